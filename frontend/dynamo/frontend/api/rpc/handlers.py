"""Handlers of calls, their messages, which are read when a handler wants them, and what they leave behind: nothing.

1. grpcio receives the message of a unary call before it runs the handler. Here the handler reads it, so that a call that is
refused
   for its metadata costs neither the decompression nor the memory of its message.
2. grpcio's call keeps the AbortError that ended it, and the error's traceback keeps every local variable on its way, the message
   included. Call and error form a cycle that only the garbage collector finds, which runs rarely here. So errors lose their
   tracebacks where they leave the handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio

from dynamo.common.errors import release

Handlers: TypeAlias = Mapping[str, "grpc.RpcMethodHandler[bytes, bytes]"]
"""Method name → handler, a coroutine function, without serializers. Requests of unary ones are taken by `read_message`."""
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class PendingMessage:
    """The message of a call with a unary request, not received yet."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> bytes:
        """Receive the message. Aborts the call if the client sent none."""
        data: object = await self._context.read()
        if isinstance(data, bytes):
            return data
        await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")


async def read_message(request: bytes | PendingMessage) -> bytes:
    """Return the message of a unary request, of which the native server has the bytes already."""
    return request if isinstance(request, bytes) else await request.read()


def for_grpcio(handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]) -> Handlers:
    """Return the handlers in the form that grpcio's server takes, which reads no message by itself."""
    return {name: _reading(handler) for name, handler in handlers.items()}


def _reading(handler: grpc.RpcMethodHandler[bytes, bytes]) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Make a handler that reads its request, or its requests, by its context. On the wire the call stays the same."""
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    inner: Callable[[Any, Context], Awaitable[Any]] = getattr(handler, f"{request}_{response}")
    reads_stream = handler.request_streaming

    async def handle(requests: object, context: Context) -> Any:
        try:
            return await inner(requests if reads_stream else PendingMessage(context), context)
        except BaseException as error:
            if isinstance(error, grpc.aio.AbortError):
                release(error)
            del requests, context  # this frame is in the next traceback
            raise

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(handle)
    return grpc.stream_unary_rpc_method_handler(handle)
