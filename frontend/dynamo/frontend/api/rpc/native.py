"""pygrpc-native's server with a shorter way for unary calls, and an end that loses no answer.

The original asks of each call anew whether its handler is a coroutine function, how to serialize its answer, and more, in three
nested coroutines. Here every unary handler is a coroutine function from bytes to bytes that checks the size of its answer and
fails by `abort` only. Overrides private methods: the version is pinned, and every gRPC test runs against this server too.
"""

from __future__ import annotations

import asyncio
import shutil

import grpc
import pygrpc_native.aio  # `from … import aio` recurses for ever in 0.5.0
from pygrpc_native._server import _fallback_socket
from pygrpc_native.aio import _Call, _Context

from dynamo.common.background import awaited
from dynamo.frontend.api.rpc.hardening import make_grpcio_server

_LAST_WRITES_S = 0.2
"""For what was handed to the I/O threads last to reach the sockets."""


class NativeServer(pygrpc_native.aio.Server):
    """A `grpc.aio.Server` for handlers that take and give bytes."""

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
        except asyncio.CancelledError:
            # Of one that was cancelled by its client or by our end, nobody hears any more.
            if not call.cancelled and not self._stopping:
                front.fail(call.call_id, grpc.StatusCode.CANCELLED.value[0], "Cancelled")
        finally:
            self._calls.pop(call.call_id, None)
            call.finish(context)

    async def _start_fallback(
        self, streamed: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]], generic: list[grpc.GenericRpcHandler]
    ) -> None:
        """Calls that stream requests are passed on to a grpcio server, here to one that takes many at once."""
        front = self._front
        assert front is not None
        self._fallback_dir, path = _fallback_socket()
        fallback = make_grpcio_server(self._options)
        for service, handlers in streamed.items():
            fallback.add_registered_method_handlers(service, handlers)
        fallback.add_insecure_port(f"unix:{path}")
        await fallback.start()
        self._fallback = fallback
        front.set_fallback(path)

    async def stop(self, grace: float | None) -> None:
        """As in grpc.aio. The original closes the sockets at once after the last handler's end, with its answer in the I/O
        threads' hands, which have no way to tell that it is written: seen to lose one under load."""
        front = self._front
        if self._stopping or front is None:
            await super().stop(grace)
            return
        self._stopping = True  # calls that come now are refused, which clients may retry elsewhere
        fallback = None if self._fallback is None else awaited(self._fallback.stop(grace))
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        if grace and tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        if fallback is not None:
            await fallback
        await asyncio.sleep(_LAST_WRITES_S)
        await asyncio.get_running_loop().run_in_executor(None, front.close)
        if self._fallback_dir is not None:
            shutil.rmtree(self._fallback_dir, ignore_errors=True)
        self._terminated.set()
