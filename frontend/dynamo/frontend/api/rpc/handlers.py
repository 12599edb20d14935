"""Handlers of calls: how they read their messages, and how they leave nothing of them in memory.

1. The servers receive the message of a unary call before they run the handler. Where callers must show credentials, the
   handler reads the message itself (`PendingMessage`), so that a call that is refused for its metadata costs neither the
   decompression nor the memory of its message. That costs some CPU time in each call, so it is done only there.
2. grpcio's call keeps the AbortError that ended it, and the error's traceback keeps every local variable on its way, the message
   included. Call and error form a cycle that only the garbage collector finds, which runs rarely here. So errors lose their
   tracebacks where they leave the handlers.
3. A large message is a `memoryview` on this project's server, and bytes otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from dynamo.common.errors import DynamoError, release
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.statuses import grpc_status, public_message, retry_after_s
from dynamo.frontend.config import OverloadStatus

call_occupancy: ContextVar[Occupancy | None] = ContextVar("call_occupancy", default=None)
"""What a unary call occupies of the capacity of the process, set where that is counted."""


class MessageSource(Protocol):
    """The part of a context that a message is read with."""

    def read(self) -> Awaitable[Any]: ...

    async def abort(self, code: grpc.StatusCode, details: str = "", /) -> NoReturn: ...


class PendingMessage:
    """The message of a call with a unary request, not received yet."""

    __slots__ = ("_context", "_has_come", "on_received", "waiting")

    def __init__(self, context: MessageSource, has_come: Callable[[], bool] = lambda: False) -> None:
        """`has_come` returns whether `read` would not wait."""
        self._context = context
        self._has_come = has_come
        self.waiting: Callable[[], AbstractContextManager[object]] | None = None
        """Entered while `read` waits for the message; an error that it raises goes to the reader."""
        self.on_received: Callable[[int], None] | None = None
        """Called with the size of the message; an error that it raises goes to the reader."""

    async def read(self) -> Buffer:
        """Receive the message. Aborts the call if the client sent none. Raises DynamoError for one that is refused."""
        waiting = self.waiting
        if waiting is None or self._has_come():
            data: object = await self._context.read()
        else:
            with waiting():
                data = await self._context.read()
        if not isinstance(data, bytes | memoryview):
            await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, "the call has no message")
        if self.on_received is not None:
            self.on_received(len(data))
        return data


async def read_buffer(request: Buffer | PendingMessage) -> Buffer:
    """Return the message of a unary request, which the server may have already."""
    return await request.read() if isinstance(request, PendingMessage) else request


async def read_message(request: Buffer | PendingMessage) -> bytes:
    """Return the message of a unary request as bytes, which copies a large one."""
    return bytes(await read_buffer(request))


async def refuse(
    context: Context, error: DynamoError, request_id: str = "", overload: OverloadStatus = OverloadStatus.UNAVAILABLE
) -> NoReturn:
    """End a call that does not reach its handler."""
    metadata: list[tuple[str, str | bytes]] = [("x-request-id", request_id or secrets.token_hex(12))]
    if (pause_s := retry_after_s(error)) is not None:
        metadata.append(("retry-after", f"{pause_s:g}"))
    await context.abort(grpc_status(error, overload), public_message(error), tuple(metadata))


def for_grpcio(operation: GrpcOperation, *, reads_late: bool = False) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Return the operation in the form that grpcio's server takes; with `reads_late` it reads no message by itself."""
    inner = operation.handle
    reads_message = reads_late and not operation.reads_stream

    async def handle(request: object, context: Context) -> Any:
        try:
            response = await inner(PendingMessage(context) if reads_message else request, context)
            return bytes(response) if isinstance(response, memoryview) else response
        except BaseException as error:
            if isinstance(error, grpc.aio.AbortError):
                release(error)
            del request, context  # this frame is in the next traceback
            raise

    # On the wire a call with a stream of one request is the same as one with a request.
    match operation.reads_stream or reads_message, operation.writes_stream:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(handle)
        case False, True:
            return grpc.unary_stream_rpc_method_handler(handle)
        case True, False:
            return grpc.stream_unary_rpc_method_handler(handle)
        case _:
            return grpc.stream_stream_rpc_method_handler(handle)
