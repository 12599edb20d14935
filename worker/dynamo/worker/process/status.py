"""A worker's status port: liveness, readiness, metrics and sleep. Off unless `--status-port` is given.

`/live` is 200 while the event loop runs. `/health` is 200 from the moment all models are registered and the frontends have
admitted them (`admission`) until the worker begins to drain, and 503 before, after, while it sleeps, and while NATS is away; etcd
going away is no reason: frontends know the instance and go on using it.

The port requires no key, so it takes orders only with `--allow-sleep`; what browsers may see of it says
`common.http.status_port`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from functools import partial
from urllib.parse import parse_qs

import msgspec

from dynamo.common.errors import Code, DynamoError, InvalidRequest
from dynamo.common.http.served import App, ServedRequest
from dynamo.common.http.status_port import JSON, Order, PageContent, Scrape, serve_status_port, status_pages
from dynamo.common.http.web_pages import OwnHosts
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.interpreter import interpreter
from dynamo.worker.config import StatusOptions
from dynamo.worker.process.sleep import Sleeper

_REFUSALS = {Code.INVALID_REQUEST: 400, Code.UNSUPPORTED: 501, Code.UNAVAILABLE: 503}

_log = logging.getLogger(__name__)


class WorkerState(StrEnum):
    STARTING = "starting"
    """Models load, NATS and etcd have not been reached, or frontends have not admitted the instance."""
    READY = "ready"
    SLEEPING = "sleeping"
    """The worker sleeps, falls asleep or wakes."""
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
    python: str


class Status:
    """What the status port shows. The start and the end of the process keep it current."""

    def __init__(self, endpoint: Endpoint, instance: InstanceId) -> None:
        self._endpoint = endpoint
        self._instance = instance
        self._started = time.monotonic_ns()
        self._models: Sequence[str] = ()
        self._nats: Connection | None = None
        self._needed: tuple[asyncio.Event, ...] = ()
        self._sleeper: Sleeper | None = None
        self._was_registered = False
        self._draining = False

    def __repr__(self) -> str:
        return f"<Status of {self._instance:x}, {self.state}, connected={self.is_connected}>"

    def show_models(self, names: Sequence[str]) -> None:
        """Show `names` as the models that are served now."""
        self._models = names

    def show_connection(self, nats: Connection) -> None:
        """Show whether `nats` is connected."""
        self._nats = nats

    def start_serving(
        self, registered: asyncio.Event, files_stored: asyncio.Event, admitted: asyncio.Event, sleeper: Sleeper
    ) -> None:
        """The worker takes requests: it is ready once all events are set, and `sleeper` takes orders."""
        self._needed = registered, files_stored, admitted
        self._sleeper = sleeper

    def start_draining(self) -> None:
        self._draining = True

    @property
    def sleeper(self) -> Sleeper | None:
        """Puts the worker to sleep; None until the worker serves."""
        return self._sleeper

    @property
    def is_connected(self) -> bool:
        """Whether NATS is connected."""
        return self._nats is not None and self._nats.is_connected

    @property
    def state(self) -> WorkerState:
        if self._draining:
            return WorkerState.DRAINING
        if self._sleeper is not None and self._sleeper.is_away:
            return WorkerState.SLEEPING
        if self._needed and all(event.is_set() for event in self._needed):
            self._was_registered = True
        return WorkerState.READY if self._was_registered else WorkerState.STARTING

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY and self.is_connected

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
                models=self._models,
                nats="connected" if self.is_connected else "disconnected",
                python=interpreter(),
            )
        )


def status_app(status: Status, scrape: Scrape, hosts: OwnHosts, *, allow_sleep: bool) -> App:
    """Return the app with `/health`, `/live`, `/metrics`, and vLLM's `/sleep`, `/wake_up`, `/is_sleeping`."""

    async def health() -> PageContent:
        return 200 if status.is_ready else 503, status.to_json(), JSON

    async def is_sleeping() -> PageContent:
        sleeping = status.sleeper is not None and status.sleeper.is_sleeping
        return 200, msgspec.json.encode({"is_sleeping": sleeping}), JSON

    async def sleep(sleeper: Sleeper, query: bytes) -> None:
        if parse_qs(query.decode("latin-1"), keep_blank_values=True).get("level", ["1"]) != ["1"]:
            raise InvalidRequest("only level=1 is supported: weights are kept in the host's memory, and the KV cache is dropped")
        await sleeper.sleep()

    async def wake_up(sleeper: Sleeper, query: bytes) -> None:
        await sleeper.wake()

    async def obey(order: Callable[[Sleeper, bytes], Awaitable[None]], request: ServedRequest) -> PageContent:
        if not allow_sleep:
            return 403, b'{"error":"the worker was started without --allow-sleep"}', JSON
        if status.sleeper is None:
            return 503, b'{"error":"the worker is still starting"}', JSON
        try:
            await order(status.sleeper, request.query)
        except DynamoError as error:
            _log.warning("%s was refused: %s", request.path, error)
            return _REFUSALS.get(error.code, 500), msgspec.json.encode({"error": str(error)}), JSON
        return await is_sleeping()

    orders: dict[str, Order] = {"/sleep": partial(obey, sleep), "/wake_up": partial(obey, wake_up)}
    return status_pages(health, scrape, {"/is_sleeping": is_sleeping}, hosts, orders)


def serve_status(options: StatusOptions, status: Status, scrape: Scrape) -> AbstractAsyncContextManager[int | None]:
    """Serve the status port while the body runs and yield its number; None without `--status-port`.

    Raises ConfigError if the port cannot be opened.
    """
    app_of = partial(status_app, status, scrape, allow_sleep=options.allow_sleep)
    return serve_status_port(options.host, options.port, options.allowed_hosts, app_of)
