"""A live view of all registrations. Without etcd the view is stale and keeps serving the last known state.

A registration ends when its owner says so: it is withdrawn, or the instance, queried by `Presence`, does not serve the model.
One that is merely absent from etcd, however that is noticed, is kept while its instance responds, and `ABSENT_S` longer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from dynamo.common.discovery import Change, Instance, View
from dynamo.common.errors import DynamoError
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.follow import follow
from dynamo.common.model_card import ModelCard
from dynamo.common.names import InstanceId, namespace_prefix
from dynamo.common.process.background import Tasks, running
from dynamo.frontend.fleet.presence import Silent, Unknown

log = logging.getLogger(__name__)

COALESCE_S = 0.05
"""Changes in etcd and marks are applied at most this often, since each subscriber and the next lookup do some work each time."""
_TURN_BYTES = 256 * 1024
"""Registrations of so many bytes are applied in one turn of the event loop: one of 1 MiB, with 100,000 names, takes 200 ms."""
RECONCILE_S = 30.0
ABSENT_S = 5.0
"""How long an instance is kept that etcd does not list and that does not respond either. If it lives, as after a pause of the
whole machine, it has registered again by then: it renews its lease every third of the TTL, and is told that it is gone."""
ASK_S = ABSENT_S / 3
"""How often an instance that etcd does not list is queried whether it is there."""
DOWN_S = 10.0
"""How long an instance stays marked down: after the TTL of a lease, the registration of a dead worker is gone as well."""

OnChange = Callable[[], None]
OnRegistrations = Callable[[Sequence[Instance], Sequence[Instance]], None]
ServedBy = Callable[[Instance], Awaitable[Collection[str] | None]]
"""Names of the models that an instance serves, as `Presence.served_by` returns them."""


async def _silent(instance: Instance) -> Collection[str] | None:
    raise Silent


class Directory:
    """The registered instances and models. All lookups are served from memory."""

    def __init__(self, etcd: Etcd, namespace: str | None) -> None:
        self.ready = asyncio.Event()
        """Set once the first listing has been applied."""
        self.stale = True
        """Whether etcd is unreachable, so that the view is the last known state."""
        self._etcd = etcd
        self._prefix = namespace_prefix(namespace)
        self._view = View()
        self._revision = 0
        """The revision of the store up to which the view is complete."""
        self._waiting: dict[str, bytes | None] = {}
        """Changes that have not been applied yet."""
        self._waiting_marks: dict[InstanceId, float | None] = {}
        """The same for marks: for how many seconds an instance is marked down; None: not any more."""
        self._applied_at = -math.inf
        self._apply_timer: asyncio.TimerHandle | None = None
        self._put_at: dict[str, int] = {}
        """The revision at which each key was put last, so that a listing shows what changed since."""
        self._absent: dict[str, float] = {}
        """Keys that are gone from etcd without a word of their owners, and until when these may respond or register again."""
        self._served_by: ServedBy = _silent
        self._asking: set[str] = set()
        """The subjects of instances that are being queried whether they are there."""
        self._tasks = Tasks()
        self._down_timers: dict[InstanceId, asyncio.TimerHandle] = {}
        self._on_change: list[OnChange] = []
        self._on_registrations: list[OnRegistrations] = []

    def __repr__(self) -> str:
        state = "stale" if self.stale else "live"
        return f"<Directory {self._prefix} {state} revision={self._revision} registrations={len(self._view.registered())}>"

    # Lookups

    def instances(self, name: str) -> Sequence[Instance]:
        """Return the instances that serve a model, alias or adapter, without those marked down. The same tuple until a change.

        Empty for a name that is not registered.
        """
        return self._view.instances(name)

    def registered(self) -> Collection[Instance]:
        """Return every registration, one per model that an instance serves, including instances marked down."""
        return self._view.registered()

    def registrations_of(self, instance: InstanceId) -> Collection[Instance]:
        """Return the registrations of one instance."""
        return self._view.registrations_of(instance).values()

    def models(self) -> Sequence[str]:
        """Return the names of the registered models, sorted, without aliases and adapters."""
        return self._view.models()

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model by its name, alias or adapter; None if it is not registered."""
        return self._view.card(name)

    def newest_first(self, name: str) -> Iterator[Instance]:
        """Yield the registrations that have a name, the newest first, including instances marked down."""
        return self._view.newest_first(name)

    def count(self, model: str) -> int:
        """Return how many registrations a model has, by its own name."""
        return self._view.count(model)

    def cards(self) -> Mapping[str, ModelCard]:
        """Return the card of each registered model by its name."""
        cards = ((model, self._view.card(model)) for model in self._view.models())
        return {model: card for model, card in cards if card is not None}

    def other_protocols(self) -> Sequence[int]:
        """Return the version of the protocol of each registration that is left out, since this process does not speak it."""
        return sorted(self._view.other_protocols.values())

    # Subscribers

    def on_change(self, callback: OnChange) -> None:
        """Call `callback`, synchronously, whenever the result of `registered` or `instances` changes."""
        self._on_change.append(callback)

    def on_registrations(self, callback: OnRegistrations) -> None:
        """Call `callback(added, removed)`, synchronously, with what `registered` gains and loses.

        A registration whose card changed is in both. An instance is gone only when its last model is. Marks do not count.
        """
        self._on_registrations.append(callback)

    # Marks

    def mark_down(self, instance: InstanceId, for_s: float = DOWN_S) -> None:
        """Leave out an unhealthy instance until it registers again, `mark_up`, or `for_s` seconds have passed.

        Takes effect at once, or within `COALESCE_S` if other changes were applied just now. The same holds for `mark_up`.
        """
        self._waiting_marks[instance] = for_s
        self._apply_soon()

    def mark_up(self, instance: InstanceId) -> None:
        """End `mark_down`: the instance responded."""
        if instance in self._waiting_marks or self._view.is_down(instance):
            self._waiting_marks[instance] = None
            self._apply_soon()

    # Instances that etcd does not list

    def confirm_by(self, served_by: ServedBy) -> None:
        """Keep registrations that are absent from etcd for as long as `served_by` says that their instances serve them."""
        self._served_by = served_by

    # Following etcd

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled. Errors of etcd are logged and do not end it."""
        watch = partial(self._etcd.watch, self._prefix, on_connected=self._connected)
        await follow("registrations", watch, self._take, on_error=self._refused)

    async def reconcile(self, every_s: float) -> None:
        """List all registrations periodically, to find what the watch has lost, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                listing = await self._etcd.range(self._prefix, prefix=True)
            except DynamoError as error:
                log.debug("the registrations could not be listed: %s", error)
                continue
            # An older listing would restore registrations that the watch has removed. It is older only while changes arrive.
            if self.ready.is_set() and listing.revision >= self._revision:
                change = self._apply_listing(listing.kvs, listing.revision)
                if change:
                    log.info("a listing found %d changes before the watch", len(change.added) + len(change.removed))

    async def close(self) -> None:
        """Stop the timers and the tasks; the view stays."""
        for instance in list(self._down_timers):
            self._stop_timer(instance)
        if self._apply_timer is not None:
            self._apply_timer.cancel()
        await self._tasks.close()

    def _take(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            self._reset(change)
        else:
            self._update(change)

    def _refused(self) -> None:
        self.stale = True

    def _connected(self, connected: bool) -> None:
        self.stale = not connected
        if connected:
            log.info("the view of %s is live", self._prefix)

    def _reset(self, reset: Reset) -> None:
        self._apply_waiting()
        if reset.history_lost:
            self._put_at.clear()
        self._apply_listing(reset.kvs, reset.revision)
        self.ready.set()

    def _update(self, events: Events) -> None:
        for event in events.events:
            # The watch may repeat changes that a listing contained.
            if isinstance(event, Put) and event.kv.mod_revision > self._revision:
                self._waiting[event.kv.key] = event.kv.value
                self._absent.pop(event.kv.key, None)
                self._put_at[event.kv.key] = event.kv.mod_revision
            elif not isinstance(event, Put) and event.revision > self._revision:
                self._deleted(event.key)
        self._revision = max(self._revision, events.revision)
        if self._waiting:
            self._apply_soon()

    def _deleted(self, key: str) -> None:
        """A registration is gone that its owner has not withdrawn: its lease expired, or another client deleted it."""
        self._put_at.pop(key, None)
        if key in self._waiting:
            self._apply({key: self._waiting.pop(key)})
        if key in self._view.other_protocols:
            self._waiting[key] = None
        self._missed([key])

    def _apply_soon(self) -> None:
        if self._apply_timer is None:
            loop = asyncio.get_running_loop()
            due_at = self._applied_at + COALESCE_S
            if due_at <= loop.time():
                self._apply_some()
            else:
                self._apply_timer = loop.call_at(due_at, self._apply_some)

    def _apply_some(self) -> None:
        """Apply as much as one turn has time for, and the rest in later ones."""
        self._apply_waiting(_TURN_BYTES)
        if self._waiting and self._apply_timer is None:
            self._apply_timer = asyncio.get_running_loop().call_later(0, self._apply_some)

    def _apply_waiting(self, most_bytes: float = math.inf) -> None:
        """Apply the marks, and the changes that the watch has delivered, since the last time: the oldest, of some bytes."""
        if self._apply_timer is not None:
            self._apply_timer.cancel()
            self._apply_timer = None
        if self._waiting or self._waiting_marks:
            changes = self._take_waiting(most_bytes)
            marks, self._waiting_marks = self._waiting_marks, {}
            self._applied_at = asyncio.get_running_loop().time()
            have_marks_changed = sum([self._apply_mark(instance, for_s) for instance, for_s in marks.items()])
            if not self._apply(changes) and have_marks_changed:
                self._notify()

    def _take_waiting(self, most_bytes: float) -> dict[str, bytes | None]:
        size, taken = 0, dict[str, bytes | None]()
        while self._waiting and size < most_bytes:
            key = next(iter(self._waiting))
            taken[key] = value = self._waiting.pop(key)
            size += len(value or b"")
        return taken

    def _apply_mark(self, instance: InstanceId, for_s: float | None) -> bool:
        """Return whether that changes which instances serve."""
        self._stop_timer(instance)
        if for_s is None:
            return self._view.mark_up(instance)
        changed = self._view.mark_down(instance)
        if self._view.is_down(instance):
            self._down_timers[instance] = asyncio.get_running_loop().call_later(for_s, self.mark_up, instance)
        if changed:
            log.info("instance %x is marked down for %g s", instance, for_s)
        return changed

    def _apply_listing(self, kvs: Sequence[KeyValue], revision: int) -> Change:
        """Apply what a listing shows to have changed. Registrations that it shows unchanged cost a comparison."""
        self._apply_waiting()
        changes: dict[str, bytes | None] = {kv.key: kv.value for kv in kvs if self._put_at.get(kv.key) != kv.mod_revision}
        self._put_at = {kv.key: kv.mod_revision for kv in kvs}
        changes |= dict.fromkeys(self._view.other_protocols.keys() - self._put_at.keys())
        for key in self._absent.keys() & self._put_at.keys():
            del self._absent[key]
        self._missed(self._view.keys - self._put_at.keys())
        self._revision = revision
        return self._apply(changes)

    def _apply(self, changes: Mapping[str, bytes | None]) -> Change:
        for key in changes:
            self._absent.pop(key, None)
        change = self._view.apply(changes)
        for instance in change.revived:
            self._stop_timer(instance)
        if change:
            self._notify(change.added, change.removed)
        return change

    def _missed(self, keys: Iterable[str]) -> None:
        """Registrations are absent from etcd: query their instances whether they are there, unless that is going on."""
        now = asyncio.get_running_loop().time()
        for key in keys:
            registered = self._view.get(key)
            if registered is None or key in self._absent:
                continue
            self._absent[key] = now if self._view.is_down(registered.id) else now + ABSENT_S
            if registered.subject not in self._asking:
                self._asking.add(registered.subject)
                self._tasks.start(self._keep_while_served(registered), "absent instance")

    async def _keep_while_served(self, instance: Instance) -> None:
        """Remove the absent registrations of an instance once it says that it does not serve them, or is silent for long."""
        loop = asyncio.get_running_loop()
        while absent := self._absent_of(instance):
            begun_at = loop.time()
            try:
                served = await self._served_by(instance)
            except Unknown:
                self._keep(absent)
            except Silent:
                overdue = [key for key in absent if self._absent.get(key, math.inf) <= loop.time()]
                self._remove(overdue, instance, "does not respond")
            else:
                left = [] if served is None else [key for key in absent if not self._is_served(key, served)]
                self._keep(absent - set(left))
                self._remove([key for key in left if key in self._absent], instance, "does not serve them any more")
            due_at = min((self._absent[key] for key in self._absent_of(instance)), default=-math.inf)
            await asyncio.sleep(min(begun_at + ASK_S, due_at) - loop.time())
        self._asking.discard(instance.subject)

    def _absent_of(self, instance: Instance) -> set[str]:
        """Return the keys of an instance that are absent from etcd."""
        own = self._view.registrations_of(instance.id).items()
        return {key for key, registered in own if key in self._absent and registered.subject == instance.subject}

    def _is_served(self, key: str, served: Collection[str]) -> bool:
        registered = self._view.get(key)
        return registered is not None and registered.card.name in served

    def _keep(self, keys: Iterable[str]) -> None:
        until = asyncio.get_running_loop().time() + ABSENT_S
        self._absent.update((key, until) for key in keys if key in self._absent)

    def _remove(self, keys: Collection[str], instance: Instance, why: str) -> None:
        if keys:
            log.warning("instance %x is not listed in etcd and %s: %d registrations end", instance.id, why, len(keys))
            self._apply(dict.fromkeys(keys))

    def _notify(self, added: Sequence[Instance] = (), removed: Sequence[Instance] = ()) -> None:
        """Call the subscribers. Without arguments: only marks have changed."""
        callbacks: list[OnChange] = []
        if added or removed:
            callbacks += [partial(callback, added, removed) for callback in self._on_registrations]
        for callback in callbacks + self._on_change:
            try:
                callback()
            except Exception:
                log.exception("a subscriber of the directory failed; the others are called nevertheless")

    def _stop_timer(self, instance: InstanceId) -> None:
        timer = self._down_timers.pop(instance, None)
        if timer is not None:
            timer.cancel()


@asynccontextmanager
async def open_directory(etcd: Etcd, namespace: str | None, *, reconcile_s: float = RECONCILE_S) -> AsyncIterator[Directory]:
    """Follow the registrations of a namespace, or of all, while the body runs. Does not wait for etcd: see `ready`."""
    directory = Directory(etcd, namespace)
    try:
        async with running(directory.follow(), "directory"), running(directory.reconcile(reconcile_s), "reconcile"):
            yield directory
    finally:
        await directory.close()
