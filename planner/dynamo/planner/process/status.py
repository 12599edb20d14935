"""The planner's status port: liveness, readiness, metrics and decisions. Off unless `--status-port` is given.

`/live` is 200 while the event loop runs. `/health` is 200 while NATS is there, of the leader and of planners that stand by; etcd
going away is no reason: targets stay as they are.

The port requires no key and takes no orders. Pages of other sites may have a browser see no more than `/live` and `/health`, and
the rest is served only under names of this machine (`common/http/web_pages.py`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

import msgspec

from dynamo.common.http.served import App, ServedRequest
from dynamo.common.http.server import serve_app
from dynamo.common.http.web_pages import OwnHosts, is_link, is_of_other_origin
from dynamo.common.lifecycle import open_listener
from dynamo.common.process.interpreter import interpreter
from dynamo.planner.config import PlannerStatusOptions
from dynamo.planner.process.state import PlannerState

_JSON = b"application/json"
_OPEN_PAGES = ("/live", "/health")
Scrape: TypeAlias = Callable[[], Awaitable[tuple[bytes, str]]]
"""Returns the text of a metrics scrape and its content type."""
_Page: TypeAlias = Callable[[], Awaitable[tuple[int, bytes, bytes]]]
"""Returns the status, the body and its type."""

log = logging.getLogger(__name__)


class ConnectionState(Protocol):
    """The part of `Connection` that is needed here."""

    @property
    def is_connected(self) -> bool: ...


class _PlannerHealth(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """`ready` or `notready`."""
    role: str
    """`leader` or `standby`."""
    planner: str
    holding: str
    nats: str
    python: str


class PlannerStatus:
    """What the status port shows. `show` keeps it current."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self._nats: ConnectionState | None = None

    def show(self, state: PlannerState) -> None:
        self.state = state

    def show_connection(self, nats: ConnectionState) -> None:
        """Show whether `nats` is connected. Before, the planner is not ready."""
        self._nats = nats

    @property
    def is_ready(self) -> bool:
        return self._nats is not None and self._nats.is_connected

    def health(self) -> bytes:
        return msgspec.json.encode(
            _PlannerHealth(
                status="ready" if self.is_ready else "notready",
                role="leader" if self.state.is_leader else "standby",
                planner=self.state.planner,
                holding=self.state.holding,
                nats="connected" if self.is_ready else "disconnected",
                python=interpreter(),
            )
        )


def planner_status_app(status: PlannerStatus, scrape: Scrape, hosts: OwnHosts) -> App:
    """Return the app with `/health`, `/live`, `/metrics` and `/explain`."""

    async def live() -> tuple[int, bytes, bytes]:
        return 200, b'{"status":"live"}', _JSON

    async def health() -> tuple[int, bytes, bytes]:
        return 200 if status.is_ready else 503, status.health(), _JSON

    async def metrics() -> tuple[int, bytes, bytes]:
        text, kind = await scrape()
        return 200, text, kind.encode()

    async def explain() -> tuple[int, bytes, bytes]:
        return 200, msgspec.json.encode(status.state), _JSON

    pages: dict[str, _Page] = {"/live": live, "/health": health, "/metrics": metrics, "/explain": explain}

    async def app(request: ServedRequest) -> None:
        page = pages.get(request.path)
        if request.path not in _OPEN_PAGES and (reason := _refusal(request, hosts)) is not None:
            code, body, kind = 403, msgspec.json.encode({"error": reason}), _JSON
        elif page is None:
            code, body, kind = 404, b'{"error":"there are /health, /live, /metrics and /explain"}', _JSON
        elif request.method not in ("GET", "HEAD"):
            code, body, kind = 405, b'{"error":"only GET is allowed"}', _JSON
        else:
            code, body, kind = await page()
        request.begin(code, ((b"content-type", kind), (b"content-length", b"%d" % len(body))))
        await request.write(body, is_last=True)

    return app


def _refusal(request: ServedRequest, hosts: OwnHosts) -> str | None:
    """Return why a browser is refused what the page that it shows wants."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
    if is_of_other_origin(headers, request.scheme) and not is_link(request.method, headers):
        return "pages of other sites may not use this port"
    host = headers.get("host", "")
    return None if hosts.include(host) else f"this port is used by its own names, and {host[:200]!r} is not among --allowed-host"


@asynccontextmanager
async def serve_planner_status(options: PlannerStatusOptions, status: PlannerStatus, scrape: Scrape) -> AsyncIterator[int | None]:
    """Serve the status port while the body runs and yield its number; None without `--status-port`.

    Raises ConfigError if the port cannot be opened.
    """
    if options.port is None:
        yield None
        return
    listener = open_listener(options.host, options.port, flag="--status-port")
    hosts = OwnHosts(options.allowed_hosts, options.host)
    async with serve_app(listener, planner_status_app(status, scrape, hosts)) as server:
        log.info("status on %s:%d", options.host, server.port)
        yield server.port
