"""Operations for tests that serve methods of their own over gRPC."""

from __future__ import annotations

from dataclasses import replace

from dynamo.frontend.api.kserve.declarations import INFER
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation, Handler
from dynamo.frontend.security.surfaces import Surface


def unary(path: str, handle: Handler, surface: Surface = Surface.INFERENCE, *, is_action: bool = False) -> GrpcOperation:
    return GrpcOperation(path=path, declared=replace(INFER, surface=surface, is_action=is_action), handle=handle)


def bidirectional(path: str, handle: Handler) -> GrpcOperation:
    return GrpcOperation(path=path, declared=INFER, handle=handle, reads_stream=True, writes_stream=True)


async def echo(request: bytes | PendingMessage, context: Context) -> bytes:
    return await read_message(request)


ECHO = [unary("/test.Echo/Say", echo)]
