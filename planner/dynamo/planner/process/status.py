"""The planner's status port: liveness, readiness, metrics and decisions. Off unless `--status-port` is given.

`/live` is 200 while the event loop runs. `/health` is 200 while NATS is there, of the leader and of planners that stand by; etcd
going away is no reason: targets stay as they are.

The port requires no key and takes no orders; what browsers may see of it says `common.http.status_port`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

import msgspec

from dynamo.common.http.served import App
from dynamo.common.http.status_port import JSON, PageContent, Scrape, serve_status_port, status_pages
from dynamo.common.http.web_pages import OwnHosts
from dynamo.common.process.interpreter import interpreter
from dynamo.planner.config import PlannerStatusOptions
from dynamo.planner.process.state import PlannerState


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

    async def health() -> PageContent:
        return 200 if status.is_ready else 503, status.health(), JSON

    async def explain() -> PageContent:
        return 200, msgspec.json.encode(status.state), JSON

    return status_pages(health, scrape, {"/explain": explain}, hosts)


def serve_planner_status(
    options: PlannerStatusOptions, status: PlannerStatus, scrape: Scrape
) -> AbstractAsyncContextManager[int | None]:
    """Serve the status port while the body runs and yield its number; None without `--status-port`.

    Raises ConfigError if the port cannot be opened.
    """
    return serve_status_port(options.host, options.port, options.allowed_hosts, partial(planner_status_app, status, scrape))
