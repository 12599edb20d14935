"""A grpc.aio server that accepts many calls at once and survives calls whose path is not UTF-8.

grpcio's own server accepts every call in one loop that, after each call, waits for the next call of every method. A busy process
so accepts one call per iteration of its event loop, and the others wait in gRPC core: with 64 streams of a fast language model,
70 of the 76 ms until the first token were spent there. Here each method has its own tasks that only accept calls.

In newer versions that loop also decodes the path of calls to unregistered methods: a single call by any client whose path is not
UTF-8 shuts the whole server down (seen with 1.85.1). All methods here are registered, so the remaining calls go to methods that
do not exist. They are refused without decoding their path.
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
"""Calls of one method that can be accepted in one iteration of the event loop."""


def make_grpcio_server(arguments: Sequence[tuple[str, int]]) -> grpc.aio.Server:
    """Make a grpc.aio server. Methods must be registered on it; generic handlers are ignored."""
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
        """Accept the calls of a method, or for None those of unregistered methods, until the server stops.

        The caller expects a future of the next call. This one is never done, and fails as expected when the server stops.
        """
        return awaited(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        acceptors = [awaited(self._accept_calls(method)) for _ in range(_ACCEPTED_AT_ONCE if method else 1)]
        try:
            await asyncio.gather(*acceptors)
        finally:  # each has failed or is about to: gRPC core fails all pending accepts when it stops
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
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "method not found")
