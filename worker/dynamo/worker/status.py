"""A worker's status port: whether it lives, whether it can serve, and its metrics. Off unless `--status-port` is given.

`/live` answers while the event loop turns. `/health` is 200 from the moment the worker is registered until it begins to drain,
and 503 before, after, and while NATS is away; etcd going away is no reason: frontends know the instance and go on using it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum

import msgspec
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo.common.http_server import serve_asgi
from dynamo.common.lifecycle import open_listener
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.telemetry import render
from dynamo.worker.config import StatusOptions

_JSON = b"application/json"
_log = logging.getLogger(__name__)


class State(StrEnum):
    STARTING = "starting"
    """Models load, or NATS and etcd have not been reached."""
    READY = "ready"
    DRAINING = "draining"


class _Uptime(msgspec.Struct, frozen=True):
    secs: int
    nanos: int


class _Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """`ready` or `notready`."""
    state: str
    uptime: _Uptime
    endpoints: dict[str, str]
    instance: str
    models: Sequence[str]
    nats: str


class Status:
    """What the status port tells; kept current by the process's start and end."""

    def __init__(self, endpoint: Endpoint, instance: InstanceId) -> None:
        self.models: Sequence[str] = ()
        """Names of those that are served now."""
        self.is_connected: Callable[[], bool] = lambda: False
        """To NATS."""
        self.is_registered: Callable[[], bool] = lambda: False
        self._endpoint = endpoint
        self._instance = instance
        self._started = time.monotonic_ns()
        self._was_registered = False
        self._draining = False

    def start_draining(self) -> None:
        self._draining = True

    @property
    def state(self) -> State:
        if self._draining:
            return State.DRAINING
        self._was_registered = self._was_registered or self.is_registered()
        return State.READY if self._was_registered else State.STARTING

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY and self.is_connected()

    def to_json(self) -> bytes:
        uptime = time.monotonic_ns() - self._started
        word = "ready" if self.is_ready else "notready"
        return msgspec.json.encode(
            _Health(
                status=word,
                state=self.state.value,
                uptime=_Uptime(uptime // 1_000_000_000, uptime % 1_000_000_000),
                endpoints={self._endpoint.name: word},
                instance=f"{self._instance:x}",
                models=self.models,
                nats="connected" if self.is_connected() else "disconnected",
            )
        )


def status_app(status: Status, registry: CollectorRegistry) -> ASGIApp:
    """`/health`, `/live`, `/metrics`."""

    def live() -> tuple[int, bytes, bytes]:
        return 200, b'{"status":"live"}', _JSON

    def health() -> tuple[int, bytes, bytes]:
        return 200 if status.is_ready else 503, status.to_json(), _JSON

    def metrics() -> tuple[int, bytes, bytes]:
        text, kind = render(registry)
        return 200, text, kind.encode()

    pages = {"/live": live, "/health": health, "/metrics": metrics}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        page = pages.get(scope["path"])
        if page is None:
            code, body, kind = 404, b'{"error":"there are /health, /live and /metrics"}', _JSON
        elif scope["method"] not in ("GET", "HEAD"):
            code, body, kind = 405, b'{"error":"only GET is answered"}', _JSON
        else:
            code, body, kind = page()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


@asynccontextmanager
async def serve_status(options: StatusOptions, status: Status, registry: CollectorRegistry) -> AsyncIterator[int | None]:
    """The port that answers until the context is left; None if there is to be none. Raises ConfigError if it cannot be had."""
    if options.port is None:
        yield None
        return
    listener = open_listener(options.host, options.port, flag="--status-port")
    async with serve_asgi(listener, status_app(status, registry)) as server:
        _log.info("status on %s:%d", options.host, server.port)
        yield server.port
