"""The guard around all gRPC handlers. Handlers that have nothing to be asked for or recorded are left as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import grpc
import grpc.aio

from dynamo.common.errors import DynamoError
from dynamo.common.security.accounts import Account, account
from dynamo.common.security.surfaces import Surface
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.grpc_health import HEALTH_SERVICE, REFLECTION_SERVICES
from dynamo.frontend.api.grpc_server import Context, Handlers
from dynamo.frontend.api.guard import Guard, record, record_refusal
from dynamo.frontend.api.statuses import grpc_status, public_message, retry_after_s

_SURFACES = {
    "ServerLive": Surface.HEALTH,
    "ServerReady": Surface.HEALTH,
    "ModelReady": Surface.HEALTH,
    "ServerMetadata": Surface.METADATA,
    "ModelMetadata": Surface.METADATA,
    "ModelConfig": Surface.MODEL_CONFIG,
    "ModelStatistics": Surface.STATISTICS,
    "RepositoryIndex": Surface.MODEL_REPOSITORY,
    "RepositoryModelLoad": Surface.MODEL_REPOSITORY,
    "RepositoryModelUnload": Surface.MODEL_REPOSITORY,
    "TraceSetting": Surface.TRACE,
    "LogSettings": Surface.LOGGING,
}
_ACTIONS = frozenset({"RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"})


def surface_of(service: str, method: str) -> Surface:
    if service == HEALTH_SERVICE:
        return Surface.HEALTH
    if service in REFLECTION_SERVICES:
        return Surface.DOCS
    if "SharedMemory" in method:
        return Surface.SHARED_MEMORY
    return _SURFACES.get(method, Surface.INFERENCE)


def guarded(services: Mapping[str, Handlers], guard: Guard) -> dict[str, Handlers]:
    """The same services, behind `guard`."""
    return {
        service: {name: _guarded(service, name, handler, guard) for name, handler in handlers.items()}
        for service, handlers in services.items()
    }


def _guarded(
    service: str, name: str, handler: grpc.RpcMethodHandler[bytes, bytes], guard: Guard
) -> grpc.RpcMethodHandler[bytes, bytes]:
    surface = surface_of(service, name)
    is_action = name in _ACTIONS
    if not guard.guards(surface) and not is_action:
        return handler
    # All our handlers are coroutines of (request or request iterator, context), whichever kind of call they serve.
    kind = _kind(handler)
    inner: Callable[[object, Context], Awaitable[object]] = getattr(handler, kind)

    async def enter(request: object, context: Context) -> object:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = usable_id(headers.get("x-request-id", ""))
        holder: Account | None = None
        try:
            holder = guard.enter(surface, headers)
        except DynamoError as error:
            if is_action:
                record_refusal(name, context.peer(), request_id, error)
            await _refuse(context, error, request_id)
        account.set(holder)
        if not is_action:
            return await inner(request, context)
        outcome = "failed"
        try:
            answer = await inner(request, context)
            outcome = "done"
            return answer
        finally:
            record(name, holder, context.peer(), request_id, outcome)

    replaced: grpc.RpcMethodHandler[bytes, bytes] = handler._replace(**{kind: enter})  # type: ignore[attr-defined]
    return replaced


def _kind(handler: grpc.RpcMethodHandler[bytes, bytes]) -> str:
    asked = "stream" if handler.request_streaming else "unary"
    answered = "stream" if handler.response_streaming else "unary"
    return f"{asked}_{answered}"


async def _refuse(context: Context, error: DynamoError, request_id: str) -> None:
    metadata: list[tuple[str, str | bytes]] = []
    if request_id:
        metadata.append(("x-request-id", request_id))
    if (pause_s := retry_after_s(error)) is not None:
        metadata.append(("retry-after", f"{pause_s:g}"))
    await context.abort(grpc_status(error), public_message(error), tuple(metadata))
