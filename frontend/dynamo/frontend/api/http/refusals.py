"""Counts requests that fail before the data plane has seen them: bad JSON, a body that is too large, a key that is wrong."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

REFUSED = "dynamo.refused"
"""Where the callback stands in an ASGI scope."""

Refused = Callable[[str, BaseException], None]
"""Told the API's name in metrics and the failure."""

_ENDPOINTS = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "anthropic_messages",
}
_KSERVE = {"infer": "tensor", "generate": "completions", "generate_stream": "completions"}


def endpoint_of(path: str) -> str | None:
    """The name of the API that a path belongs to; None for paths that take no requests of models."""
    if path.startswith("/v2/models/"):
        return _KSERVE.get(path.rpartition("/")[2])
    return _ENDPOINTS.get(path)


class CountRefusals:
    """An ASGI application around another one, whose exchanges say here how they failed."""

    def __init__(self, app: ASGIApp, refused: Refused) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (endpoint := endpoint_of(scope["path"])) is not None:
            scope[REFUSED] = lambda error: self._refused(endpoint, error)
        await self._app(scope, receive, send)
