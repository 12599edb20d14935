"""pygrpc-native's server with a shorter path for unary calls, and a shutdown that loses no response.

For each call, the original determines whether its handler is a coroutine function, how to serialize its response, and more, in
three nested coroutines. Here every unary handler is a coroutine function from bytes to bytes that checks the size of its response
and fails only by `abort`. This overrides private methods: the version is pinned, and every gRPC test also runs against this
server.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence

import grpc
import pygrpc_native.aio  # `from … import aio` recurses for ever in 0.5.0
from pygrpc_native._server import _fallback_socket
from pygrpc_native.aio import _Call, _Context

from dynamo.common.errors import release
from dynamo.frontend.api.rpc.handlers import Context, for_grpcio, function_of, with_function
from dynamo.frontend.api.rpc.hardening import make_grpcio_server

_LAST_WRITES_S = 0.2
"""How long the last responses, which the I/O threads have, are given to reach the sockets."""


class NativeServer(pygrpc_native.aio.Server):
    """A `grpc.aio.Server` for handlers that take and give bytes."""

    def __init__(self, options: Sequence[tuple[str, int]], io_threads: int) -> None:
        super().__init__(options=options, io_threads=io_threads)
        self._streams: set[asyncio.Task[object]] = set()
        """Calls with streamed requests, which the fallback serves."""

    def _dispatch(self) -> None:
        """Hand calls to the event loop, and keep nothing of them while waiting; the original keeps up to 64 messages."""
        front, loop = self._front, self._loop
        assert front is not None and loop is not None
        while (events := front.recv_batch_details(64)) is not None:
            try:
                loop.call_soon_threadsafe(self._on_events, events)
            except RuntimeError:  # the event loop was closed without `stop`
                front.close()
                return
            del events

    async def _run(self, call: _Call, payload: bytes) -> None:
        if call.streaming:
            await super()._run(call, payload)
            return
        front, handler = self._front, call.handler.unary_unary
        assert front is not None and handler is not None
        context = _Context(self, call)
        try:
            ok, request = self._request(call, payload)
            if not ok:  # it was too large, and the call has failed
                return
            response = await handler(request, context)  # type: ignore[arg-type]  # it does all that handlers use
            initial, trailing = context._initial_metadata, context._trailing_metadata
            front.respond(call.call_id, response, initial and list(initial), trailing and list(trailing))
        except Exception as error:
            self._failed(call, context, error)
            release(error)
        except asyncio.CancelledError:
            # A call that was cancelled by its client or by the shutdown needs no status.
            if not call.cancelled and not self._stopping:
                front.fail(call.call_id, grpc.StatusCode.CANCELLED.value[0], "Cancelled")
        finally:
            self._calls.pop(call.call_id, None)
            call.finish(context)

    async def _start_fallback(
        self, streamed: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]], generic: list[grpc.GenericRpcHandler]
    ) -> None:
        """Start the grpcio server that handles calls with streamed requests, here one that accepts many at once."""
        front = self._front
        assert front is not None
        self._fallback_dir, path = _fallback_socket()
        fallback = make_grpcio_server(self._options)
        for service, handlers in streamed.items():
            followed = {name: self._following(handler) for name, handler in handlers.items()}
            fallback.add_registered_method_handlers(service, dict(for_grpcio(followed)))
        fallback.add_insecure_port(f"unix:{path}")
        await fallback.start()
        self._fallback = fallback
        front.set_fallback(path)

    def _following(self, handler: grpc.RpcMethodHandler[bytes, bytes]) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Make a handler whose calls `stop` waits for, and which refuses new ones then.

        The fallback itself must not refuse them: the front would report that as INTERNAL, which clients do not retry.
        """
        inner = function_of(handler)

        async def follow(requests: object, context: Context) -> object:
            if self._stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Server is shutting down")
            task = asyncio.current_task()
            assert task is not None, "handlers run in tasks"
            self._streams.add(task)
            try:
                return await inner(requests, context)
            finally:
                self._streams.discard(task)

        return with_function(handler, follow)

    async def stop(self, grace: float | None) -> None:
        """Stop as grpc.aio does. The original closes the sockets right after the last handler's end, while the I/O threads may
        still have its response to write, without a way to tell: under load, responses were lost."""
        front = self._front
        if self._stopping or front is None:
            await super().stop(grace)
            return
        self._stopping = True  # new calls are refused, and clients may retry them elsewhere
        tasks = [*(call.task for call in self._calls.values() if call.task is not None), *self._streams]
        if grace and tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(_LAST_WRITES_S)
        await asyncio.get_running_loop().run_in_executor(None, front.close)
        if self._fallback is not None:
            await self._fallback.stop(None)
        if self._fallback_dir is not None:
            shutil.rmtree(self._fallback_dir, ignore_errors=True)
        self._terminated.set()
