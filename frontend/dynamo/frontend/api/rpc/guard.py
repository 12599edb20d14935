"""Authentication, authorization and audit of gRPC calls. Operations that need none of it are left as they are."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.logs import request_id as logged_id
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.declaration import Charge
from dynamo.frontend.api.guard import Guard, record, record_refusal
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_buffer, refuse
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.keys import key_name
from dynamo.frontend.security.surfaces import Surface

_account: ContextVar[Account] = ContextVar("account")
"""Set by the guard for the handler of a call. It has no default: a handler that no guard has entered must not go on."""


def account_source(guard: Guard) -> Callable[[], Account]:
    """Return a function that returns, in a handler behind `guard`, the account of the call."""
    return _account.get if guard.requires_keys else lambda: ANONYMOUS


def guarded(
    operations: Iterable[GrpcOperation], guard: Guard, refused: Callable[[BaseException], None] = lambda error: None
) -> list[GrpcOperation]:
    """Wrap operations by `guard`. `refused` is called with the error of each refused inference request."""
    return [_guarded(operation, guard, refused) for operation in operations]


def _guarded(operation: GrpcOperation, guard: Guard, refused: Callable[[BaseException], None]) -> GrpcOperation:
    declared, inner = operation.declared, operation.handle
    surface, is_action = declared.surface, declared.is_action
    is_inference = declared.charge is Charge.REQUESTS
    if not guard.guards(surface) and not is_action:
        return operation

    async def enter(request: object, context: Context) -> object:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = usable_id(headers.get("x-request-id", ""))
        try:
            guard.check_unique(key for key, _ in context.invocation_metadata() or ())
            account = guard.enter(declared, headers, takes_login=True)  # no web page speaks gRPC
            if is_inference and not operation.reads_stream:
                account.check_limits()
            stream = account.open_stream() if is_inference and operation.reads_stream else None
        except DynamoError as error:
            request_id = request_id or secrets.token_hex(12)
            if is_action:
                record_refusal(operation.method, context.peer(), request_id, error)
            if surface is Surface.INFERENCE:
                refused(error)
            await refuse(context, error, request_id)
        _account.set(account)
        key_name.set(account.name)
        if is_inference and isinstance(request, PendingMessage):
            request.waiting = account.occupy
        if stream is not None:
            with stream:
                return await inner(request, context)
        if not is_action:
            return await inner(request, context)
        assert isinstance(request, bytes | memoryview | PendingMessage), "actions have unary requests"
        message = await read_buffer(request)
        action = _action(operation, message)
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

    return replace(operation, handle=enter)


def _action(operation: GrpcOperation, message: Buffer) -> str:
    """Return the action for the audit record: the method, and the model if there is one."""
    if operation.model_of is None:
        return operation.method
    try:
        model = operation.model_of(message)
    except InvalidRequest:
        return operation.method
    return f"{operation.method} {model[:200]!r}"  # quoted: no line breaks that could forge a record
