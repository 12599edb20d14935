"""A grpc.aio server that survives calls whose path is not UTF-8.

grpcio's own accepts every call in one loop, and in its newer versions that loop decodes the path of calls to unregistered
methods: one such call from anybody, with one byte that is no UTF-8, and the server shuts down with everything it was doing (seen
with 1.85.1). All our methods are registered, so what is left are calls to methods that do not exist. Here they are accepted
beside that loop, and refused without a look at their path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)


def make_grpcio_server(arguments: Sequence[tuple[str, int]], compression: grpc.Compression) -> grpc.aio.Server:
    """A grpc.aio server. Methods must be registered on it; generic handlers are not asked."""
    server = grpc.aio.server(options=arguments, compression=compression)
    if hasattr(cygrpc.AioServer, "_make_request_call_future"):  # older ones decode the path in the call's own task
        options = [*arguments, ("grpc.default_compression_algorithm", compression.value)]
        loop = cygrpc.get_working_loop()
        server._server = _AioServer(loop, None, (), (), options, None)  # type: ignore[attr-defined]
    return server


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> Any:
        """A future of the next call of a method; for None, of the next call of any other: which never comes."""
        if method is not None:
            return super()._make_request_call_future(method)
        return asyncio.get_running_loop().create_task(self._refuse_unknown_methods(), name="calls of unknown methods")

    async def _refuse_unknown_methods(self) -> None:
        refusals: set[asyncio.Task[None]] = set()  # the loop keeps weak references only
        while True:  # until the server stops, which `_request_call` says by an error that the caller expects
            call = await self._request_call()
            refusal = asyncio.create_task(_refuse(call))
            refusals.add(refusal)
            refusal.add_done_callback(refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError):  # the AbortError, or the client is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
