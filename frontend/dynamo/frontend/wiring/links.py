"""The connections of a frontend, as far as they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.records import RecordStore
from dynamo.common.messaging.nats.connection import Connection, OnMessage
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.observability.server_settings import SettingsStore
from dynamo.frontend.api.http.management.server import LinkState
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.event_bus import EventBus, EventSubscription
from dynamo.frontend.fleet.leases import Leases
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.fleet.peers.siblings import Siblings
from dynamo.frontend.fleet.peers.usage import UsageStore
from dynamo.frontend.names.table import Change, NameTable
from dynamo.frontend.router.loads.thresholds import Thresholds
from dynamo.frontend.security.ledger import Row
from dynamo.frontend.security.sharing import Fleet

T = TypeVar("T")


@dataclass(slots=True)
class Links:
    """What a frontend has reached: nothing at first, since HTTP is served before; filled by `wiring.plane` as it starts.

    The HTTP side is given this object rather than the connections.
    """

    connection: Connection | None = None
    """For requests, and for the few other messages that must arrive."""
    events: EventBus | None = None
    client: RequestClient | None = None
    directory: Directory | None = None
    siblings: Siblings | None = None
    names: NameTable | None = None
    settings: SettingsStore | None = None
    """Trace and log settings of the namespace."""
    responses: RecordStore | None = None
    """The stored responses."""
    response_changes: ResponseChanges | None = None
    batches: RecordStore | None = None
    """Files and batches."""
    batch_leases: Leases | None = None
    limits: Fleet | None = None
    """The processes that share the limits of API keys."""
    usage: UsageStore | None = None

    @property
    def nats(self) -> LinkState:
        if self.connection is None:
            return LinkState.CONNECTING
        return LinkState.CONNECTED if self.connection.is_connected else LinkState.DISCONNECTED

    @property
    def follows_events(self) -> bool:
        """Whether events of the fleet are followed; False while this process is too far behind."""
        return self.events is None or not self.events.is_dropped

    @property
    def other_protocols(self) -> Sequence[int]:
        """Versions of the protocol of the registrations that are left out for it."""
        return () if self.directory is None else self.directory.other_protocols()

    @property
    def etcd(self) -> LinkState:
        if self.directory is None or not self.directory.ready.is_set():
            return LinkState.CONNECTING
        return LinkState.STALE if self.directory.stale else LinkState.CONNECTED

    async def subscribe(self, subject: str, on_message: OnMessage) -> EventSubscription:
        """Subscribe to events. Raises Unavailable while there is no connection yet."""
        return await _connected(self.events, "NATS").subscribe(subject, on_message)

    def set_thresholds(self, model: str, thresholds: Thresholds) -> None:
        """Set the busy thresholds of a model in all frontends of the namespace; raise Unavailable while NATS is not connected."""
        _connected(self.siblings, "NATS").set_thresholds(model, thresholds)

    def stored_responses(self) -> RecordStore:
        """Return the store of responses. Raises Unavailable until there is a connection."""
        return _connected(self.responses, "NATS")

    def changes_of_responses(self) -> ResponseChanges:
        """Return what announces changes of stored responses. Raises Unavailable until there is a connection."""
        return _connected(self.response_changes, "NATS")

    def stored_batches(self) -> RecordStore:
        """Return the store of files and batches. Raises Unavailable until there is a connection."""
        return _connected(self.batches, "NATS")

    def leases_of_batches(self) -> Leases:
        """Raises Unavailable until there is a connection."""
        return _connected(self.batch_leases, "etcd")

    async def read_usage(self, first_day: str, last_day: str) -> list[Row]:
        """Return what the keys have used. Raises Unavailable."""
        if self.usage is None:
            raise Unavailable("there is no usage ledger: it needs API keys, a connection to NATS, and --usage-ledger")
        return await self.usage.read(first_day, last_day)

    def server_settings(self) -> SettingsStore:
        """Return the trace and log settings. Raises Unavailable until there is a connection."""
        return _connected(self.settings, "etcd")

    async def change_names(self, change: Change) -> None:
        """Change the names of models for all frontends of the namespace. Raises InvalidRequest, Unavailable."""
        await _connected(self.names, "etcd").change(change)


def _connected(link: T | None, server: str) -> T:
    """Return `link`. Raises Unavailable if it is not there yet."""
    if link is None:
        raise Unavailable(f"there is no connection to {server} yet")
    return link
