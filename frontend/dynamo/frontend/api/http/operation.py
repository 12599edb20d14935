"""An operation: one method of one path, with everything the HTTP server derives from it.

    Operation(
        method="GET", path="/v1/models/{model:path}", declared=shown(Surface.METADATA), errors=OPENAI_ERRORS, handle=handle,
        summary="One model", group="Models",
    )

Routing, what `declaration.py` has of an operation, the metrics of refused requests, the form of errors and `/openapi.json` all
read the same object, so they cannot disagree on what a path is. All operations of one path have the same surface and form of
errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from dynamo.frontend.api.calls import TIMEOUT, read_timeout_s
from dynamo.frontend.api.declaration import Charge, Declaration, within
from dynamo.frontend.api.http.errors import ErrorForm
from dynamo.frontend.api.http.exchange import Exchange

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    """A template of `paths.py`."""
    method: str = "POST"
    """`GET` serves HEAD, too."""
    declared: Declaration
    errors: ErrorForm
    handle: Handler
    endpoint: str = ""
    """The name in metrics of the API whose refused requests are counted; empty: they are not."""

    summary: str = ""
    """For `/openapi.json`; without one the operation is not described there."""
    group: str = ""
    request: Any = None
    """The type of the request's body; None: there is none."""
    response: Any = None
    error: Any = None
    streams: bool = False
    """The response may be server-sent events, if the request says `stream`."""
    binary: bool = False
    """JSON may be followed by binary data, in requests and responses."""


_WITHOUT_WAIT = (Charge.NOTHING, Charge.REQUESTS)
"""What health does takes no time, and the data plane keeps the deadlines of requests."""


def within_declared(operation: Operation) -> Handler:
    """Return the handler of an operation within the place among a key's requests, and within the time, that it declares.

    It ends when the client leaves, too. Handlers of requests to models begin to watch the client once they have read the request.
    """
    declared, handle = operation.declared, operation.handle
    if declared.charge in _WITHOUT_WAIT and declared.deadline_s is None:
        return handle

    async def limited(exchange: Exchange) -> None:
        limit_s, timeout = declared.deadline_s, exchange.headers.get(TIMEOUT)
        if timeout is not None:
            limit_s = min(read_timeout_s(timeout), float("inf") if limit_s is None else limit_s)
        with exchange.account.occupy() if declared.charge is Charge.WORK else nullcontext():
            async with within(limit_s), exchange.attended():
                await handle(exchange)

    return limited
