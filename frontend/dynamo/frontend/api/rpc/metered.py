"""The metrics `grpc_server_*` of all gRPC operations. This is the outermost wrapper, so that refusals count; for both servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from time import perf_counter

import grpc
import grpc.aio

from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.port_metrics import GrpcMethodMetrics, GrpcServerMetrics

_OK = "OK"


def metered(operations: Iterable[GrpcOperation], metrics: GrpcServerMetrics) -> list[GrpcOperation]:
    """Wrap operations by metrics. Handlers must read and write streams by their context's `read` and `write`."""
    return [_metered(operation, metrics) for operation in operations]


def _metered(operation: GrpcOperation, metrics: GrpcServerMetrics) -> GrpcOperation:
    service, name, inner, reads = operation.service, operation.method, operation.handle, operation.reads_stream
    if not operation.writes_stream:
        return replace(operation, handle=_unary(inner, metrics.for_method(service, name, "unary")))
    method = metrics.for_method(service, name, "bidi_stream" if reads else "server_stream")
    return replace(operation, handle=_streaming(inner, method, reads=reads))


def _unary(
    inner: Callable[[bytes, Context], Awaitable[bytes]], method: GrpcMethodMetrics
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    started, received, sent, handled = method.started, method.received, method.sent, method.handled

    async def handle(request: bytes, context: Context) -> bytes:
        started_at = perf_counter()
        started.value += 1
        received.value += 1
        try:
            response = await inner(request, context)
        except BaseException as error:
            handled(_code(error, context), perf_counter() - started_at)
            raise
        sent.value += 1
        handled(_OK, perf_counter() - started_at)
        return response

    return handle


def _streaming(
    inner: Callable[[object, Context], Awaitable[object]], method: GrpcMethodMetrics, *, reads: bool
) -> Callable[[object, Context], Awaitable[object]]:
    async def handle(request: object, context: Context) -> object:
        started_at = perf_counter()
        method.started.value += 1
        if not reads:
            method.received.value += 1
        code = _OK
        try:
            return await inner(request, _Counting(context, method))  # type: ignore[arg-type]  # it passes on all else
        except BaseException as error:
            code = _code(error, context)
            raise
        finally:
            method.handled(code, perf_counter() - started_at)

    return handle


class _Counting:
    """A context that counts the messages of its call."""

    def __init__(self, context: Context, method: GrpcMethodMetrics) -> None:
        self._context = context
        self._received = method.received
        self._sent = method.sent
        self._read: Callable[[], Awaitable[object]] = context.read
        self._write = context.write

    async def read(self) -> object:
        message = await self._read()
        if message is not grpc.aio.EOF:
            self._received.value += 1
        return message

    def write(self, message: bytes) -> Awaitable[None]:
        self._sent.value += 1
        return self._write(message)

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)


def _code(error: BaseException, context: Context) -> str:
    """Return the status in the form that gRPC metrics use: `InvalidArgument`."""
    if isinstance(error, grpc.aio.AbortError):
        status: object = context.code()
        if isinstance(status, grpc.StatusCode):
            return "".join(word.capitalize() for word in status.name.split("_"))
    return "Canceled" if isinstance(error, asyncio.CancelledError) else "Unknown"
