"""What gRPC calls declare, and the capacity of the process: their number, time, and the bytes of the messages of unary ones.

1. Calls to health are always served. Past the capacity, all others are refused. If the handler reads the message itself
   (`PendingMessage`), the call is refused before that; if the message came with the call, its size counts at once.
2. A stream counts as one call here, of which each key has a share: it may do nothing for long. Its handler counts the requests in
   it, since only the handler knows when one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from dynamo.common.errors import DeadlineExceeded, DynamoError, Overloaded
from dynamo.frontend.api.capacity import Capacity, Occupancy
from dynamo.frontend.api.declaration import within
from dynamo.frontend.api.rpc.handlers import PendingMessage, call_occupancy, refuse
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation, Handler
from dynamo.frontend.config import OverloadStatus
from dynamo.frontend.security.keys import key_name
from dynamo.frontend.security.surfaces import Surface


def bounded(
    operations: Iterable[GrpcOperation],
    capacity: Capacity,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    refused: Callable[[BaseException], None] = lambda error: None,
) -> list[GrpcOperation]:
    """Wrap operations by `capacity`. `refused` is called with the error of each refused inference request."""
    return [
        operation
        if operation.declared.surface is Surface.HEALTH
        else _bounded(operation, capacity, overload, refused if operation.declared.surface is Surface.INFERENCE else None)
        for operation in operations
    ]


def _bounded(
    operation: GrpcOperation, capacity: Capacity, overload: OverloadStatus, refused: Callable[[BaseException], None] | None
) -> GrpcOperation:
    if operation.reads_stream:
        return _bounded_stream(operation, capacity, overload, refused)
    inner, copies = _in_time(operation), operation.declared.copies

    async def enter(request: object, context: Context) -> Any:
        problem: DynamoError | None = None
        occupied: Occupancy | None = None
        try:
            occupied = capacity.enter()
            call_occupancy.set(occupied)
            if isinstance(request, bytes | memoryview):
                occupied.hold(copies * len(request))
            elif isinstance(request, PendingMessage):
                request.on_received = partial(_hold, occupied, copies)
            return await inner(request, context)
        except (Overloaded, DeadlineExceeded) as error:  # ours: handlers turn their errors into statuses
            problem = error
        finally:
            if occupied is not None:
                occupied.leave()
        await _refuse(context, problem, overload, refused)

    return replace(operation, handle=enter)


def _bounded_stream(
    operation: GrpcOperation, capacity: Capacity, overload: OverloadStatus, refused: Callable[[BaseException], None] | None
) -> GrpcOperation:
    inner = _in_time(operation)

    async def enter(request: object, context: Context) -> Any:
        problem: DynamoError
        try:
            with capacity.stream(key_name.get()):
                return await inner(request, context)
        except (Overloaded, DeadlineExceeded) as error:
            problem = error
        await _refuse(context, problem, overload, refused)

    return replace(operation, handle=enter)


async def _refuse(
    context: Context, problem: DynamoError, overload: OverloadStatus, refused: Callable[[BaseException], None] | None
) -> NoReturn:
    if refused is not None:
        refused(problem)
    await refuse(context, problem, overload=overload)


def _hold(occupied: Occupancy, copies: int, size_bytes: int) -> None:
    occupied.hold(copies * size_bytes)


def _in_time(operation: GrpcOperation) -> Handler:
    """Return the handler of an operation within the time that it declares; the server itself keeps the caller's deadline."""
    inner, limit_s = operation.handle, operation.declared.deadline_s
    if limit_s is None:
        return inner

    async def limited(request: object, context: Context) -> Any:
        async with within(limit_s):
            return await inner(request, context)

    return limited
