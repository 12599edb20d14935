"""An operation: one method of one path, with everything the HTTP server derives from it.

    Operation(
        method="GET", path="/v1/models/{model:path}", surface=Surface.METADATA, errors=OPENAI_ERRORS, handle=handle,
        summary="One model", group="Models",
    )

Routing, authorization, the metrics of refused requests, the form of errors and `/openapi.json` all read the same object, so they
cannot disagree on what a path is. All operations of one path have the same surface and form of errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from dynamo.frontend.api.http.exchange import ErrorForm, Exchange
from dynamo.frontend.security.surfaces import Surface

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    """A template of `paths.py`."""
    method: str = "POST"
    """`GET` serves HEAD, too."""
    surface: Surface
    errors: ErrorForm
    handle: Handler
    endpoint: str = ""
    """The name in metrics of the API whose refused requests are counted; empty: they are not."""
    is_action: bool = False
    """Changes something for others, so each use is recorded for audits."""

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
