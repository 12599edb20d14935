"""Keeps a KV router in step with the caches and loads that instances publish.

Each instance numbers its updates without holes, and a `fleet.kv.follow.Follower` per model and instance says what may be applied
and when something is missing: a hole, a new instance, a load report that speaks of updates never seen. Then the feed queries the
instance: for the updates it missed, or for a snapshot of everything. So an index is exact again a round trip after the next
update or report, whatever was lost, also while there was no connection. An instance that is gone is cleared.

While events are dropped because this process cannot follow them (`event_bus`), the caches count as unknown. Afterwards every
instance is queried for what was missed. However many queries are due, they are sent at a bounded rate.

With a history (durable events, `history`), a component's past is read from the store first, and only the instances that the
history does not cover are queried.

What an instance may add is bounded, since it could be invented: an update has `MAX_UPDATE_BLOCKS` at most, one with many blocks
is applied in steps, and of one instance no more are kept than some times what its card says that it caches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import (
    KvQuery,
    KvSnapshot,
    KvUpdate,
    LoadReport,
    check_snapshot,
    check_update,
    load_message_decoder,
    message_encoder,
    read_message,
    snapshot_decoder,
)
from dynamo.common.kv.hashes import HASH_BYTES
from dynamo.common.kv.tiers import TierChange
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.model_card import LlmInfo
from dynamo.common.names import Endpoint, InstanceId, instance_of
from dynamo.common.process.background import Tasks, running_tasks
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.event_bus import Closable, EventBus
from dynamo.frontend.fleet.kv.follow import Follower
from dynamo.frontend.fleet.kv.history import Key, KvHistory
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable

log = logging.getLogger(__name__)

Query = Callable[[Instance, str, bytes, float], Awaitable[Buffer]]
"""Sends one instance a query about itself and returns the response: instance, verb, body, deadline."""

_QUERY_TIMEOUT_S = 2.0
"""A query without a response is repeated after this time."""
_MAX_QUERIES = 32
"""Queries at once. Snapshots take memory, and the loop's time, while they come in."""
_QUERIES_PER_S = 200.0
"""Queries that are begun, once `_MAX_QUERIES` have been begun at once: a thousand instances in five seconds."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_STEP_BYTES = 1 << 13
"""Hashes that are applied in one turn of the event loop: 1,024 blocks, for each of which memory is read that is in none of the
processor's caches. They take 0.6 ms (`benchmarks.long_prompts`, 2026-11-27)."""
_MANY_BYTES = 1 << 62
"""For an update of any size."""
_MAX_WAITING = 512
"""Parts of updates that wait for their turn. Beyond it, updates of an instance count as lost, and are queried later."""
_KEPT_PER_BLOCK = 16
"""Blocks kept of an instance for each that its card says it caches: it may cache more of them in slower memory."""
_FEWEST_KEPT, _MOST_KEPT = 1 << 17, 1 << 23
_KEPT_WITHOUT_TOTAL = 1 << 22
"""For an instance whose card does not say how many blocks it caches."""
_MAX_MISSED = 1 << 16
"""Updates in one response: twice as many as an instance keeps."""
_updates_decoder = msgspec.msgpack.Decoder(Annotated[list[KvUpdate], msgspec.Meta(max_length=_MAX_MISSED)] | None)


class _Source:
    """One model of one instance."""

    __slots__ = ("applying", "follower", "instance", "max_blocks", "resync", "room_bytes", "waiting")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.follower = Follower()
        self.resync: asyncio.Task[None] | None = None
        self.max_blocks = max_kept_blocks(instance.card.llm)
        self.room_bytes = self.max_blocks * HASH_BYTES
        """Hashes that updates may have, removed ones included, before it is looked up again how many are kept."""
        self.waiting: deque[KvUpdate] = deque()
        """Parts of updates that are applied in later turns, in this order."""
        self.applying: asyncio.Task[None] | None = None
        """Applies what waits."""


def max_kept_blocks(card: LlmInfo | None) -> int:
    """Return how many blocks are kept of an instance."""
    total = 0 if card is None else card.total_blocks * max(1, card.data_parallel_size)
    return min(max(_KEPT_PER_BLOCK * total, _FEWEST_KEPT), _MOST_KEPT) if total > 0 else _KEPT_WITHOUT_TOTAL


def _parts(update: KvUpdate) -> Iterator[KvUpdate]:
    """Yield updates that change the same in small steps."""
    if update.cleared:
        yield KvUpdate(update.number, cleared=True)
    for begin in range(0, len(update.removed), _STEP_BYTES):
        yield KvUpdate(update.number, removed=update.removed[begin : begin + _STEP_BYTES])
    for begin in range(0, len(update.stored), _STEP_BYTES):
        yield KvUpdate(update.number, stored=update.stored[begin : begin + _STEP_BYTES])
    for change in update.tiers:
        for begin in range(0, len(change.removed), _STEP_BYTES):
            part = TierChange(change.name, removed=change.removed[begin : begin + _STEP_BYTES])
            yield KvUpdate(update.number, tiers=(part,))
        for begin in range(0, len(change.stored), _STEP_BYTES):
            part = TierChange(change.name, stored=change.stored[begin : begin + _STEP_BYTES])
            yield KvUpdate(update.number, tiers=(part,))


class _Pacer:
    """Limits the rate of what begins: `burst` at once, then `per_s` in each second."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        self._burst_s = burst / per_s
        self._loop = asyncio.get_running_loop()
        self._next_at = float("-inf")

    async def wait(self) -> None:
        """Return when the next one may begin."""
        now = self._loop.time()
        self._next_at = max(self._next_at, now - self._burst_s) + self._interval_s
        if self._next_at > now:
            await asyncio.sleep(self._next_at - now)


class _Component:
    """What the instances of one component publish."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.subscriptions: list[Closable] = []
        self.is_reading_history = True
        """Its history is still being read: what is missing now may be found there."""


def _component_of(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.namespace, endpoint.component


class KvFeed:
    """Use `open_kv_feed`."""

    def __init__(
        self,
        bus: EventBus,
        directory: Directory,
        query: Query,
        caches: KvRouter | None,
        loads: LoadTable,
        history: KvHistory | None,
        on_left_out: Callable[[str, int], None],
        tasks: Tasks,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._query = query
        self._caches = caches
        self._loads = loads
        self._history = history
        self._on_left_out = on_left_out
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._sources: dict[Key, _Source] = {}
        self._components: dict[tuple[str, str], _Component] = {}
        self._registered: dict[InstanceId, set[str]] = {}
        """The language models of each registered instance."""
        self._unreadable_updates = Unreadable("a KV update")
        self._excess = Unreadable("a part of a KV update")
        self._steps = asyncio.Lock()
        """One step in a turn of the event loop, of whichever instance."""
        self._unreadable_reports = Unreadable("a load report")
        self._turns = asyncio.Semaphore(_MAX_QUERIES)
        self._pace = _Pacer(_QUERIES_PER_S, _MAX_QUERIES)
        self._is_suspended = False
        self._stale: set[_Source] = set()
        """Sources that have not been queried since `resume`."""
        self.resyncs = 0
        """How often an instance was queried for what was missed."""

    def number(self, instance: InstanceId, model: str) -> int | None:
        """Return the number of the last update applied of an instance, -1 for none; None if it is not followed."""
        source = self._sources.get((instance, model))
        return None if source is None else source.follower.number

    def is_in_step(self, instance: InstanceId, model: str) -> bool:
        """Return whether all is known that an instance has published of its cache, or nothing of it is to be known now."""
        source = self._sources.get((instance, model))
        if source is None or self._caches is None or self._is_suspended:
            return True
        llm = source.instance.card.llm
        publishes = llm is not None and llm.total_blocks > 0
        return not publishes or not (source.follower.is_behind or source.waiting or source.applying)

    # Following the directory

    def is_registered(self, instance: InstanceId) -> bool:
        """Whether a language model of this instance is registered. What is published of any other instance is ignored."""
        return instance in self._registered

    def registrations_changed(self, added: Sequence[Instance], removed: Sequence[Instance]) -> None:
        """Follow new instances, and clear those that are gone. One whose card changed is followed as before."""
        present: dict[Key, Instance] = {}
        for instance in removed:
            self._unregister(instance)
        for instance in added:
            if instance.card.llm is not None:
                self._registered.setdefault(instance.id, set()).add(instance.card.name)
                self._follow_component(instance.endpoint)
                if instance.card.llm.block_size:
                    present[instance.id, instance.card.name] = instance
        for instance in removed:
            key = (instance.id, instance.card.name)
            if key not in present and key in self._sources:
                self._drop(self._sources.pop(key))
        for key, instance in present.items():
            if key not in self._sources:
                self._sources[key] = source = _Source(instance)
                self._catch_up(source)

    def _unregister(self, instance: Instance) -> None:
        models = self._registered.get(instance.id, set())
        models.discard(instance.card.name)
        if not models:
            self._registered.pop(instance.id, None)

    def _drop(self, source: _Source) -> None:
        self._cancel_resync(source)
        source.waiting.clear()
        self._no_longer_stale(source)
        self._loads.remove_report(source.instance.id, source.instance.card.name)
        if self._caches is not None:
            self._caches.apply(source.instance.card.name, source.instance.id, KvUpdate(0, cleared=True))

    def _follow_component(self, endpoint: Endpoint) -> None:
        name = _component_of(endpoint)
        if name in self._components:
            return
        self._components[name] = component = _Component(endpoint)
        self._tasks.start(self._follow(component), f"KV feed of {endpoint}")

    async def _follow(self, component: _Component) -> None:
        endpoint = component.endpoint
        for subject, callback in ((endpoint.kv_subject(), self.on_kv), (endpoint.load_subject(), self.on_load)):
            component.subscriptions.append(await self._subscribe(subject, callback))
        if self._history is not None and self._caches is not None:
            await self._history.read(endpoint, self)
        component.is_reading_history = False
        for key in self.followed(endpoint):
            self._catch_up(self._sources[key])
        if self._history is not None and self._caches is not None:
            await self._history.keep_compact(endpoint, self)

    async def _subscribe(self, subject: str, callback: OnMessage) -> Closable:
        while True:
            await self._bus.connected()
            try:
                return await self._bus.subscribe(subject, callback)
            except DynamoError as error:
                log.warning("%s cannot be followed yet: %s", subject, error)
                await asyncio.sleep(_LONGEST_PAUSE_S)

    # What the history has on record

    def followed(self, endpoint: Endpoint) -> set[Key]:
        """Return the instances of a component that are followed, with their models."""
        name = _component_of(endpoint)
        return {key for key, source in self._sources.items() if _component_of(source.instance.endpoint) == name}

    def restore(self, instance: InstanceId, model: str, snapshot: KvSnapshot) -> None:
        """Apply a snapshot of the record: what an instance held once."""
        source = self._sources.get((instance, model))
        if source is not None:
            self._replace(source, snapshot)

    def apply_update(self, instance: InstanceId, model: str, update: KvUpdate, size_bytes: int = _MANY_BYTES) -> None:
        """Apply an update of now or of the record. Instances that are not registered yet are dropped and queried later.

        `size_bytes` is at least what its hashes have.
        """
        source = self._sources.get((instance, model))
        if source is not None and self._caches is not None:
            if source.waiting and len(source.waiting) > _MAX_WAITING:
                return source.follower.announced(update.number)  # as if it were lost
            is_short = size_bytes <= _STEP_BYTES
            self._apply(source, source.follower.update(update), update if is_short else None, size_bytes)
            self._catch_up(source)

    def most_blocks(self, instance: InstanceId, model: str) -> int:
        """Return how many blocks are kept of an instance; 0 if it is not followed."""
        source = self._sources.get((instance, model))
        return 0 if source is None else source.max_blocks

    async def fetch_snapshot(self, instance: InstanceId, model: str) -> KvSnapshot | None:
        """Query what an instance holds; None if it does not respond."""
        source = self._sources.get((instance, model))
        if source is None:
            return None
        try:
            return await self._query_snapshot(source)
        except (DynamoError, ValueError, RecursionError) as error:
            log.debug("instance %x did not send its KV cache: %s", instance, error)
            return None

    # Messages

    def on_kv(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Handle an update."""
        try:
            message = read_message(payload)
            instance = instance_of(subject)
        except (ValueError, RecursionError) as error:
            return self._unreadable_updates.drop(subject, error)
        self.apply_update(instance, message.model, message.update, payload.nbytes)
        if self._history is not None:
            self._history.count_events(subject)

    def on_load(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Handle a load report. Those of instances and models that are not registered are ignored: they could be invented."""
        try:
            message = load_message_decoder.decode(payload)
            instance = instance_of(subject)
        except (ValueError, RecursionError) as error:
            return self._unreadable_reports.drop(subject, error)
        if message.model not in self._registered.get(instance, ()):
            return
        report: LoadReport = message.report
        self._loads.report(instance, report, self._loop.time(), message.model)
        self._directory.mark_up(instance)
        source = self._sources.get((instance, message.model))
        if source is not None:
            # Updates and reports travel on different subjects but one connection: what a report speaks of came before it.
            source.follower.announced(report.kv_number)
            self._catch_up(source)

    def _apply(self, source: _Source, updates: Iterable[KvUpdate], short: KvUpdate | None = None, short_bytes: int = 0) -> None:
        """Apply updates, in steps if they are long; `short` is one that has `short_bytes` at most."""
        assert self._caches is not None
        for update in updates:
            size = short_bytes if update is short else update.hash_bytes
            source.room_bytes -= size
            if source.waiting or source.room_bytes < 0 or size > _STEP_BYTES:
                self._apply_later(source, update)
            else:
                self._caches.apply(source.instance.card.name, source.instance.id, update)

    def _apply_later(self, source: _Source, update: KvUpdate) -> None:
        source.waiting.extend(_parts(update))
        if source.applying is None and source.waiting:
            source.applying = self._tasks.start(self._apply_waiting(source), "KV updates")

    async def _apply_waiting(self, source: _Source) -> None:
        assert self._caches is not None
        instance = source.instance
        while source.waiting:
            async with self._steps:
                if source.waiting:  # else the instance left, or a snapshot came
                    part = self._fitting(source, source.waiting.popleft())
                    self._caches.apply(instance.card.name, instance.id, part)
                await asyncio.sleep(0)
        source.applying = None

    def _fitting(self, source: _Source, part: KvUpdate) -> KvUpdate:
        """Return a part without what its instance has too many of: its last blocks, whose parents are kept."""
        change: KvUpdate | TierChange = part.tiers[0] if part.tiers else part
        if not change.stored:
            return part
        assert self._caches is not None
        instance = source.instance
        room = max(0, source.max_blocks - self._caches.held_blocks(instance.card.name, instance.id)) * HASH_BYTES
        source.room_bytes = max(0, room - len(change.stored))
        if len(change.stored) <= room:
            return part
        excess = (len(change.stored) - room) // HASH_BYTES
        self._on_left_out(instance.card.name, excess)
        reason = f"of {instance.id:x}, {source.max_blocks} blocks are kept, and {excess} more are left out"
        self._excess.drop(instance.endpoint.kv_subject(), reason)
        fitting = change.stored[:room]
        if isinstance(change, TierChange):
            return KvUpdate(part.number, tiers=(TierChange(change.name, stored=fitting),))
        return KvUpdate(part.number, stored=fitting)

    def _replace(self, source: _Source, snapshot: KvSnapshot) -> None:
        assert self._caches is not None
        updates = source.follower.snapshot(snapshot)
        if updates is not None:
            source.waiting.clear()
            first, rest = snapshot.blocks[:_STEP_BYTES], snapshot.blocks[_STEP_BYTES:]
            self._caches.replace(source.instance.card.name, source.instance.id, KvSnapshot(snapshot.number, first))
            source.room_bytes = source.max_blocks * HASH_BYTES - snapshot.hash_bytes
            if rest or snapshot.tiers:
                self._apply_later(source, KvUpdate(snapshot.number, stored=rest, tiers=snapshot.tiers))
            self._apply(source, updates)

    # While events are dropped

    def suspend(self) -> None:
        """Events are not received any more: the caches are unknown, and instances are not queried."""
        self._is_suspended = True
        self._stale.clear()
        for source in self._sources.values():
            self._cancel_resync(source)
        if self._caches is not None:
            self._caches.set_current(False)

    def resume(self) -> None:
        """Events are received again: query every instance for what was missed, and then use the caches again."""
        self._is_suspended = False
        if self._caches is None:
            return
        for source in self._sources.values():
            if not self._is_reading_history(source):
                self._stale.add(source)
                self._start_resync(source)
        self._use_if_current()

    def _no_longer_stale(self, source: _Source) -> None:
        if source in self._stale:
            self._stale.remove(source)
            self._use_if_current()

    def _use_if_current(self) -> None:
        if self._caches is not None and not self._stale and not self._is_suspended:
            self._caches.set_current(True)
            log.info("the KV caches of all instances are known again")

    # Queries

    def _catch_up(self, source: _Source) -> None:
        if source.follower.is_behind and not self._is_reading_history(source):
            self._start_resync(source)

    def _is_reading_history(self, source: _Source) -> bool:
        return self._components[_component_of(source.instance.endpoint)].is_reading_history

    def _start_resync(self, source: _Source) -> None:
        if self._caches is not None and source.resync is None and not self._is_suspended:
            source.resync = self._tasks.start(self._resync(source), "KV resync")

    def _cancel_resync(self, source: _Source) -> None:
        if source.resync is not None:
            source.resync.cancel()
            source.resync = None

    async def _resync(self, source: _Source) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            if source.applying is not None:
                await asyncio.wait((source.applying,))
            try:
                async with self._turns:
                    await self._pace.wait()
                    await self._query_missed(source)
            except (DynamoError, ValueError, RecursionError) as error:
                log.debug("instance %x did not send its KV cache: %s", source.instance.id, error)
                self._no_longer_stale(source)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            self._no_longer_stale(source)
            if not source.follower.is_behind:
                source.resync = None
                return

    async def _query_missed(self, source: _Source) -> None:
        self.resyncs += 1
        instance, model = source.instance, source.instance.card.name
        since = source.follower.request_from()
        if since is not None:
            query_body = message_encoder.encode(KvQuery(model, since))
            response = await self._query(instance, "events_since", query_body, self._loop.time() + _QUERY_TIMEOUT_S)
            updates: Sequence[KvUpdate] | None = _updates_decoder.decode(response)
            if updates is not None:
                for update in updates:
                    check_update(update)
                self._apply(source, source.follower.recovered(updates))
                return
        self._replace(source, await self._query_snapshot(source))

    async def _query_snapshot(self, source: _Source) -> KvSnapshot:
        query_body = message_encoder.encode(KvQuery(source.instance.card.name))
        response = await self._query(source.instance, "snapshot", query_body, self._loop.time() + _QUERY_TIMEOUT_S)
        snapshot: KvSnapshot = snapshot_decoder.decode(response)
        check_snapshot(snapshot)
        return snapshot

    async def close(self) -> None:
        for component in self._components.values():
            for subscription in component.subscriptions:
                await subscription.close()


@asynccontextmanager
async def open_kv_feed(
    bus: EventBus,
    directory: Directory,
    query: Query,
    caches: KvRouter | None,
    loads: LoadTable,
    history: KvHistory | None = None,
    on_left_out: Callable[[str, int], None] = lambda model, blocks: None,
) -> AsyncIterator[KvFeed]:
    """Keep `caches` and `loads` current while the body runs. Without caches, only the loads.

    `on_left_out`: called with the model and the number of blocks that are not kept, since their instance has too many.
    """
    async with running_tasks() as tasks:
        feed = KvFeed(bus, directory, query, caches, loads, history, on_left_out, tasks)
        directory.on_registrations(feed.registrations_changed)
        feed.registrations_changed(tuple(directory.registered()), ())
        try:
            yield feed
        finally:
            await tasks.close()
            await feed.close()
