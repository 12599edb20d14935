"""A grpc.aio server that takes calls as they come and survives those whose path is not UTF-8.

grpcio's own accepts every call in one loop, which after each waits anew for the next of every method. A process with much to do
so takes one call per turn of its event loop, and the others wait in gRPC core, unseen: with 64 streams of a fast language model,
70 of the 76 ms until the first token were spent there. Here each method has acceptors of its own that only accept.

In its newer versions that loop also decodes the path of calls to unregistered methods: one such call from anybody, with one
byte that is no UTF-8, and the server shuts down with everything it was doing (seen with 1.85.1). All our methods are registered,
so what is left are calls to methods that do not exist. They are refused without a look at their path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from dynamo.common.background import Tasks, awaited

_ACCEPTED_AT_ONCE = 64
"""Calls of one method that can be taken in one turn of the event loop."""


def make_grpcio_server(arguments: Sequence[tuple[str, int]]) -> grpc.aio.Server:
    """A grpc.aio server. Methods must be registered on it; generic handlers are not asked."""
    server = grpc.aio.server(options=arguments)
    if hasattr(cygrpc.AioServer, "_make_request_call_future"):  # older ones accept in another way
        loop = cygrpc.get_working_loop()
        server._server = _AioServer(loop, None, (), (), list(arguments), None)  # type: ignore[attr-defined]
    return server


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._handlers: dict[str, Any] = {}
        self._calls = Tasks()

    def add_registered_method_handlers(self, method_handlers: Mapping[str, Any]) -> None:
        super().add_registered_method_handlers(method_handlers)
        self._handlers.update(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """A future of the next call of a method, for None of any other: never done, since calls are taken in here.

        When the server stops, it fails as the caller expects.
        """
        return awaited(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        acceptors = [awaited(self._accept_calls(method)) for _ in range(_ACCEPTED_AT_ONCE if method else 1)]
        try:
            await asyncio.gather(*acceptors)
        finally:  # each has failed or is about to: gRPC core fails all that waits for calls when it stops
            await asyncio.gather(*acceptors, return_exceptions=True)

    async def _accept_calls(self, method: bytes | None) -> None:
        name = method.decode() if method is not None else ""
        resolver = cygrpc._MethodResolver([], self._handlers)
        loop = asyncio.get_running_loop()
        while True:
            try:
                call = await (self._request_call() if method is None else self._request_registered_call(method))
            except cygrpc._RequestCallError:
                if self.is_running():
                    continue
                raise
            if method is None:
                self._calls.start(_refuse(call))
            else:
                handling = cygrpc._handle_rpc(name, resolver, (), call, loop, False)
                self._calls.start(cygrpc._schedule_rpc_coro(handling, call, loop, name))


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError):  # the AbortError, or the client is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
