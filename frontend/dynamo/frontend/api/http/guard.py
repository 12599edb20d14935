"""The guard in front of all HTTP paths."""

from __future__ import annotations

import secrets
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo.common.errors import DynamoError, Unauthenticated
from dynamo.frontend.api.anthropic.messages import ANTHROPIC_ERRORS
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.guard import BROWSED, Guard, record, record_refusal
from dynamo.frontend.api.http.exchange import ACCOUNT, JSON, ErrorForm, Exchange, HttpSettings
from dynamo.frontend.api.kserve.rest.paths import Resource, find
from dynamo.frontend.api.kserve.rest.routes import ERRORS as KSERVE_ERRORS
from dynamo.frontend.api.openai.errors import OPENAI_ERRORS
from dynamo.frontend.api.statuses import http_status, retry_after_s
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.surfaces import Surface

_SURFACES = {
    "/live": Surface.HEALTH,
    "/health": Surface.HEALTH,
    "/metrics": Surface.METRICS,
    "/docs": Surface.DOCS,
    "/openapi.json": Surface.DOCS,
    "/busy_threshold": Surface.THRESHOLDS,
    "/v1/routing/decisions": Surface.CONSOLE,
    "/v1/models": Surface.METADATA,
    "/v1/messages/count_tokens": Surface.METADATA,
    **dict.fromkeys(("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"), Surface.METADATA),
}
_KSERVE = {
    "health": Surface.HEALTH,
    "repository": Surface.MODEL_REPOSITORY,
    "logging": Surface.LOGGING,
    "trace": Surface.TRACE,
    "systemsharedmemory": Surface.SHARED_MEMORY,
    "cudasharedmemory": Surface.SHARED_MEMORY,
}
_RESOURCES = {
    Resource.MODEL_READY: Surface.HEALTH,
    Resource.MODEL: Surface.METADATA,
    Resource.CONFIG: Surface.MODEL_CONFIG,
    Resource.STATISTICS: Surface.STATISTICS,
    Resource.ALL_STATISTICS: Surface.STATISTICS,
}
_ADMIN = frozenset({Surface.MODEL_REPOSITORY, Surface.LOGGING, Surface.TRACE, Surface.SHARED_MEMORY, Surface.THRESHOLDS})
_ADMIN_PATHS = ("/busy_threshold", "/v2/repository", "/v2/logging", "/v2/trace", "/v2/systemshared", "/v2/cudashared")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def surface_of(path: str, raw_path: bytes) -> Surface:
    """What a path belongs to. Paths that are not there count as inference: only who holds a key learns which those are."""
    if (known := _SURFACES.get(path)) is not None:
        return known
    if path == "/v2" or path.startswith("/v2/"):
        return _kserve_surface(raw_path)
    if path.startswith("/v1/models/"):
        return Surface.METADATA
    if path == "/console" or path.startswith("/console/"):
        return Surface.CONSOLE
    return Surface.INFERENCE


def _kserve_surface(raw_path: bytes) -> Surface:
    words = [unquote(word) for word in raw_path.decode("latin-1").split("/")[2:]]
    if not words:
        return Surface.METADATA
    if words[0] != "models":
        return _KSERVE.get(words[0], Surface.INFERENCE)
    if words[-2:] == ["trace", "setting"]:
        return Surface.TRACE
    target = find(raw_path)
    return Surface.INFERENCE if target is None else _RESOURCES.get(target.resource, Surface.INFERENCE)


def _is_admin(path: str) -> bool:
    return path.startswith(_ADMIN_PATHS) or path.endswith("/trace/setting")


def _errors_of(path: str) -> ErrorForm:
    if path.startswith("/v1/messages"):
        return ANTHROPIC_ERRORS
    return KSERVE_ERRORS if path == "/v2" or path.startswith("/v2/") else OPENAI_ERRORS


class HttpGuard:
    """An ASGI application around another one. Without keys and restrictions it only records what administrators do."""

    def __init__(self, app: ASGIApp, guard: Guard, settings: HttpSettings) -> None:
        self._app = app
        self._guard: Guard | None = guard if guard.is_on else None
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path: str = scope["path"]
        if self._guard is None:
            scope[ACCOUNT] = ANONYMOUS
            if _is_admin(path):
                return await self._recorded(scope, receive, send, ANONYMOUS)
            return await self._app(scope, receive, send)
        surface = surface_of(path, scope["raw_path"])
        account: Account = ANONYMOUS
        if self._guard.guards(surface):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            browsing = surface in BROWSED and scope["method"] in _READING
            try:
                account = self._guard.enter(surface, headers, browsing=browsing)
            except DynamoError as error:
                return await self._refuse(error, surface, scope, receive, send)
        scope[ACCOUNT] = account
        if surface in _ADMIN:
            return await self._recorded(scope, receive, send, account)
        return await self._app(scope, receive, send)

    async def _refuse(self, error: DynamoError, surface: Surface, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings)
        exchange.refused(error)
        if surface in _ADMIN:
            record_refusal(_action(scope), _peer(scope), exchange.known_id(), error)
        status = http_status(error, self._settings.overload)
        headers = [JSON]
        if isinstance(error, Unauthenticated):
            headers.append((b"www-authenticate", b'Basic realm="dynamo"' if surface in BROWSED else b"Bearer"))
        if (pause_s := retry_after_s(error)) is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(pause_s))))
        await exchange.answer(_errors_of(exchange.path).body(error, status), status, tuple(headers))

    async def _recorded(self, scope: Scope, receive: Receive, send: Send, account: Account) -> None:
        """Reading is no action."""
        path: str = scope["path"]
        if scope["method"] in _READING or path.endswith("/index"):
            return await self._app(scope, receive, send)
        request_id = usable_id(next((v.decode("latin-1") for n, v in scope["headers"] if n == b"x-request-id"), ""))
        if not request_id:  # the record and the answer shall name the same one
            request_id = secrets.token_hex(12)
            others = [header for header in scope["headers"] if header[0] != b"x-request-id"]
            scope = {**scope, "headers": [*others, (b"x-request-id", request_id.encode())]}
        outcome = "no answer"

        async def noticing(message: Message) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                outcome = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noticing)
        finally:
            record(_action(scope), account, _peer(scope), request_id, outcome)


def _action(scope: Scope) -> str:
    path: bytes = scope["raw_path"]  # still encoded: no line breaks that could forge a record
    return f"{scope['method']} {path[:200].decode('ascii', 'replace')}"


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
