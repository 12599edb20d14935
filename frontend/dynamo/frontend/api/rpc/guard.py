"""Authentication, authorization and audit of gRPC calls. Handlers of unguarded surfaces without audit are left unwrapped."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar

import grpc
import grpc.aio

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.logs import request_id as logged_id
from dynamo.common.message_limits import parse_message
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.guard import Guard, record, record_refusal
from dynamo.frontend.api.rpc.handlers import Context, Handlers, PendingMessage, function_of, read_message, refuse, with_function
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.surfaces import Surface
from dynamo.protos import inference_pb2 as pb

_account: ContextVar[Account] = ContextVar("account")
"""Set by the guard for the handler of a call. It has no default: a handler that no guard has entered must not go on."""

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
_ACTIONS = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "TraceSetting",
        "LogSettings",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    }
)
"""Calls that change state, even those that this server never allows."""
_WITH_MODEL: dict[str, type[pb.RepositoryModelLoadRequest] | type[pb.RepositoryModelUnloadRequest]] = {
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest,
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest,
}


def surface_of(service: str, method: str) -> Surface:
    if service == HEALTH_SERVICE:
        return Surface.HEALTH
    if service in REFLECTION_SERVICES:
        return Surface.DOCS
    if "SharedMemory" in method:
        return Surface.SHARED_MEMORY
    return _SURFACES.get(method, Surface.INFERENCE)


def account_source(guard: Guard) -> Callable[[], Account]:
    """Return a function that returns, in a handler behind `guard`, the account of the call."""
    return _account.get if guard.requires_keys else lambda: ANONYMOUS


def guarded(
    services: Mapping[str, Handlers], guard: Guard, refused: Callable[[BaseException], None] = lambda error: None
) -> dict[str, Handlers]:
    """Wrap the handlers of services by `guard`. `refused` is called with the error of each refused inference request."""
    return {
        service: {name: _guarded(service, name, handler, guard, refused) for name, handler in handlers.items()}
        for service, handlers in services.items()
    }


def _guarded(
    service: str,
    name: str,
    handler: grpc.RpcMethodHandler[bytes, bytes],
    guard: Guard,
    refused: Callable[[BaseException], None],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    surface = surface_of(service, name)
    is_action = name in _ACTIONS
    if not guard.guards(surface) and not is_action:
        return handler
    inner = function_of(handler)

    async def enter(request: object, context: Context) -> object:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = usable_id(headers.get("x-request-id", ""))
        try:
            guard.check_unique(key for key, _ in context.invocation_metadata() or ())
            account = guard.enter(surface, headers, takes_login=True)  # no web page speaks gRPC
        except DynamoError as error:
            request_id = request_id or secrets.token_hex(12)
            if is_action:
                record_refusal(name, context.peer(), request_id, error)
            if surface is Surface.INFERENCE:
                refused(error)
            await refuse(context, error, request_id)
        _account.set(account)
        if not is_action:
            return await inner(request, context)
        assert isinstance(request, bytes | memoryview | PendingMessage), "actions have unary requests"
        message = await read_message(request)
        action = _action(name, message)
        if not request_id:  # the audit record and the response must have the same one
            request_id = secrets.token_hex(12)
            logged_id.set(request_id)
            context.set_trailing_metadata((("x-request-id", request_id),))
        outcome = "failed"
        try:
            response = await inner(message, context)
            outcome = "done"
            return response
        finally:
            record(action, account, context.peer(), request_id, outcome)

    return with_function(handler, enter)


def _action(name: str, message: bytes) -> str:
    """Return the action for the audit record: the method, and the model if there is one."""
    kind = _WITH_MODEL.get(name)
    if kind is None:
        return name
    try:
        model = parse_message(kind, message).model_name
    except InvalidRequest:
        return name
    return f"{name} {model[:200]!r}"  # quoted: no line breaks that could forge a record
