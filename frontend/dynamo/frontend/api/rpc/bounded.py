"""The capacity of the process applied to gRPC calls: their number, and the bytes of the messages of unary ones.

1. Calls to health are always served. Past the capacity, all others are refused. If the handler reads the message itself
   (`PendingMessage`), the call is refused before that; if the message came with the call, its size counts at once.
2. A stream counts as one call here. Its handler counts the requests in it, since only the handler knows when one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from dynamo.common.errors import Overloaded
from dynamo.frontend.api.capacity import Capacity, Occupancy
from dynamo.frontend.api.rpc.guard import surface_of
from dynamo.frontend.api.rpc.handlers import Context, Handlers, PendingMessage, function_of, refuse, with_function
from dynamo.frontend.config import OverloadStatus
from dynamo.frontend.security.surfaces import Surface


def bounded(
    services: Mapping[str, Handlers],
    capacity: Capacity,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    refused: Callable[[BaseException], None] = lambda error: None,
) -> dict[str, Handlers]:
    """Wrap the handlers of services by `capacity`. `refused` is called with the error of each refused inference request."""
    return {
        service: {
            name: handler
            if (surface := surface_of(service, name)) is Surface.HEALTH
            else _bounded(handler, capacity, overload, refused if surface is Surface.INFERENCE else None)
            for name, handler in handlers.items()
        }
        for service, handlers in services.items()
    }


def _bounded(
    handler: grpc.RpcMethodHandler[bytes, bytes],
    capacity: Capacity,
    overload: OverloadStatus,
    refused: Callable[[BaseException], None] | None,
) -> grpc.RpcMethodHandler[bytes, bytes]:
    inner = function_of(handler)

    async def enter(request: object, context: Context) -> Any:
        problem: Overloaded | None = None
        occupied: Occupancy | None = None
        try:
            occupied = capacity.enter()
            if isinstance(request, bytes | memoryview):
                occupied.hold(len(request))
            elif isinstance(request, PendingMessage):
                request.on_received = occupied.hold
            return await inner(request, context)
        except Overloaded as error:  # ours: handlers turn their errors into statuses
            problem = error
        finally:
            if occupied is not None:
                occupied.leave()
        if refused is not None:
            refused(problem)
        await refuse(context, problem, overload=overload)

    return with_function(handler, enter)
