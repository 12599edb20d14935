"""The HTTP side, which is always up: health, metrics, the list of models. Protocols add routes of their own.

routes = [*health_routes(readiness, links), *metrics_routes(render), *model_routes(readiness)]
async with serve_http(options, make_app(routes)) as server: ...
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo.common.discovery import other_names
from dynamo.common.errors import ModelNotFound
from dynamo.common.http_server import HttpServer, serve_asgi
from dynamo.common.lifecycle import open_listener
from dynamo.common.model_card import ModelCard
from dynamo.common.security.tls import server_context
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.health import Readiness, State
from dynamo.frontend.api.http.exchange import Endpoint, account_of
from dynamo.frontend.api.statuses import http_status, log_failure, public_message, retry_after_s
from dynamo.frontend.config import HttpOptions, OverloadStatus

Render = Callable[[], tuple[bytes, str]]
"""Makes the text of a metrics scrape and its content type."""

_log = logging.getLogger(__name__)


class LinkState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    STALE = "stale"
    """Not reached now; the last known view is used."""


class Links(Protocol):
    """How the process stands with the systems behind it."""

    @property
    def nats(self) -> LinkState: ...

    @property
    def etcd(self) -> LinkState: ...


def make_app(routes: Sequence[BaseRoute], overload: OverloadStatus = OverloadStatus.UNAVAILABLE) -> ASGIApp:
    """All routes in one application, whose errors are JSON."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        return error_response(error.status_code, what.get(error.status_code, error.detail), headers=error.headers)

    others = Starlette(
        routes=list(routes),
        middleware=[Middleware(_AnswerFailures, overload=overload)],
        exception_handlers={HTTPException: refused},
    )
    return _EndpointsFirst(others, routes)


class _EndpointsFirst:
    """Asks endpoints that take a POST at a fixed path directly: they answer their own failures, and what a framework puts around
    a request and each piece of its answer costs about as much as the rest of it."""

    def __init__(self, others: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._others = others
        self._endpoints = {
            route.path: route.app
            for route in routes
            if isinstance(route, Route)
            and isinstance(route.app, Endpoint)
            and route.methods == {"POST"}
            and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._others)(scope, receive, send)


class _AnswerFailures:
    """Answers and logs what a route raises. Starlette's own handlers raise it on, and the server logs it once more."""

    def __init__(self, app: ASGIApp, overload: OverloadStatus) -> None:
        self._app = app
        self._overload = overload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noticing(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                _repeat_id(scope, message)
            await send(message)

        try:
            await self._app(scope, receive, noticing)
        except Exception as error:
            request = Request(scope)
            log_failure(error, request.headers.get("x-request-id", ""), f"{request.method} {request.url.path}")
            if started:
                return  # the server closes the connection, which is all that can be said now
            pause_s = retry_after_s(error)
            headers = {} if pause_s is None else {"retry-after": str(max(1, round(pause_s)))}
            status = http_status(error, self._overload)
            code = "model_not_found" if isinstance(error, ModelNotFound) else None
            await error_response(status, public_message(error), code=code, headers=headers)(scope, receive, send)


def _repeat_id(scope: Scope, message: Message) -> None:
    """Puts the request's id into the answer's headers, one made up if it has none; endpoints of their own have done so."""
    headers = message.setdefault("headers", [])
    if any(name == b"x-request-id" for name, _ in headers):
        return
    asked = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    headers.append((b"x-request-id", (usable_id(asked) or secrets.token_hex(12)).encode()))


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented",
    503: "service_unavailable",
    504: "timeout",
    529: "service_unavailable",
}


def error_response(status: int, message: str, *, code: str | None = None, headers: object = None) -> Response:
    """The error body that OpenAI clients read."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    extra = {str(name): str(value) for name, value in dict(headers or {}).items()}  # type: ignore[call-overload]
    return json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, extra)


# Health


def health_routes(readiness: Readiness, links: Links) -> list[BaseRoute]:
    """`/live` says that the process runs, `/health` whether it can serve, and what stands behind it."""

    async def live(request: Request) -> Response:
        return json_response({"status": "live", "message": "the server is running"})

    async def health(request: Request) -> Response:
        state = readiness.state()
        registered = [] if state is State.STARTING else sorted(readiness.plane.models.registered(), key=lambda i: i.id)
        body: dict[str, object] = {
            "status": state.value,
            "nats": links.nats.value,
            "etcd": links.etcd.value,
            "endpoints": sorted({f"dyn://{instance.endpoint}" for instance in registered}),
            "instances": [
                {
                    "instance_id": f"{instance.id:x}",
                    "namespace": instance.endpoint.namespace,
                    "component": instance.endpoint.component,
                    "endpoint": instance.endpoint.name,
                    "model": instance.card.name,
                    "transport": {"nats": instance.subject},
                }
                for instance in registered
            ],
        }
        if links.etcd is LinkState.STALE:
            body["detail"] = "etcd cannot be reached; the instances are those of the last view"
        return json_response(body, 200 if state is State.READY else 503)

    return [Route("/live", live), Route("/health", health)]


# Metrics and models


def metrics_routes(render: Render) -> list[BaseRoute]:
    async def metrics(request: Request) -> Response:
        text, content_type = render()
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]


def model_routes(readiness: Readiness, started_at: float) -> list[BaseRoute]:
    """`/v1/models` as OpenAI has it: the models that are known, with whether they can be used now."""

    def describe(card: ModelCard, name: str) -> dict[str, object]:
        found: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": int(started_at),
            "owned_by": card.platform,
            "kind": card.kind.value,
            "ready": readiness.is_model_ready(name),
        }
        if name != card.name:
            found["parent"] = card.name
        if card.llm is not None:
            found["max_model_len"] = card.llm.context_length
        return found

    async def models(request: Request) -> Response:
        account = account_of(request.scope)
        cards = readiness.plane.cards(account)
        named = [(card, name) for card in cards for name in (card.name, *other_names(card)) if account.permits(name)]
        return json_response({"object": "list", "data": [describe(card, name) for card, name in named]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        return json_response(describe(readiness.plane.card(account_of(request.scope), name), name))

    async def ready(request: Request) -> Response:
        name = request.path_params["model"]
        readiness.plane.card(account_of(request.scope), name)
        is_ready = readiness.is_model_ready(name)
        return json_response({"id": name, "ready": is_ready}, 200 if is_ready else 503)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}/ready", ready),
        Route("/v1/models/{model:path}", model),
    ]


# The server


@asynccontextmanager
async def serve_http(options: HttpOptions, app: ASGIApp, *, share_port: bool = False) -> AsyncIterator[HttpServer]:
    """Serves `app` until the context is left. Raises ConfigError if the port or the certificate cannot be used."""
    context = None if options.tls is None else server_context(options.tls)
    listener = open_listener(options.host, options.port, flag="--http-port", reuse_port=share_port)
    async with serve_asgi(listener, app, context) as server:
        _log.info("HTTP on %s:%d, %s", options.host, server.port, "no TLS" if context is None else "TLS")
        yield server
