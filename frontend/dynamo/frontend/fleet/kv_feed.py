"""Keeps a KV router in step with what instances tell about their caches and loads.

Each instance numbers its updates without holes, and a `common.kv.follow.Follower` per model and instance says what may be applied
and when something is missing: a hole, a new instance, a load report that speaks of updates never seen. Then the feed asks the
instance: for the updates it missed, or for a snapshot of everything. So an index is exact again a round trip after the next
update or report, whatever was lost, and be it while we were cut off. An instance that is gone is cleared.

With a history (durable events, `kv_history`), a component's past is read from the store first, and only the instances that it
does not tell everything about are asked.

With replica sync, bookings are exchanged with the other frontends of the namespace as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.background import Tasks, running, running_tasks
from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import (
    KvQuery,
    KvSnapshot,
    KvUpdate,
    LoadReport,
    load_message_decoder,
    message_encoder,
    read_message,
    snapshot_decoder,
)
from dynamo.common.messaging.connection import Connection, OnMessage
from dynamo.common.messaging.frames import Buffer
from dynamo.common.names import Endpoint, InstanceId, instance_of
from dynamo.frontend.fleet.kv_follow import Follower
from dynamo.frontend.fleet.kv_history import Key, KvHistory
from dynamo.frontend.router.load import BookingEvent, LoadTable

log = logging.getLogger(__name__)

Ask = Callable[[Instance, str, bytes, float], Awaitable[Buffer]]
"""One instance's answer to a question about itself: instance, verb, body, deadline."""

_ANSWER_S = 2.0
"""A question without an answer is asked again."""
_ASKED_AT_ONCE = 64
"""Instances. Their snapshots take memory, and the loop's time, while they come in."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_ALIVE_S = 1.0
_updates_decoder = msgspec.msgpack.Decoder(list[KvUpdate] | None)
_bookings_decoder = msgspec.msgpack.Decoder(list[BookingEvent])


class Caches(Protocol):
    """What the feed keeps up to date; `router.kv.KvRouter` is one."""

    def apply(self, model: str, instance: InstanceId, update: KvUpdate) -> None: ...

    def replace(self, model: str, instance: InstanceId, snapshot: KvSnapshot) -> None: ...


class Directory(Protocol):
    """The part of `common.directory.Directory` that the feed needs."""

    def registered(self) -> Collection[Instance]: ...

    def on_change(self, callback: Callable[[], None]) -> None: ...

    def mark_up(self, instance: InstanceId) -> None: ...


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """The part of `messaging.connection.Connection` that the feed needs."""

    async def connected(self) -> None: ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription: ...


class _Source:
    """One model of one instance."""

    __slots__ = ("asking", "follower", "instance")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.follower = Follower()
        self.asking: asyncio.Task[None] | None = None


class _Component:
    """What instances of one component publish."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.subscriptions: list[Subscription] = []
        self.in_the_past = True
        """Its history is still being read: what is missing now may be found there."""


def _component_of(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.namespace, endpoint.component


class KvFeed:
    """Use `open_kv_feed`."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        ask: Ask,
        caches: Caches | None,
        loads: LoadTable,
        history: KvHistory | None,
        tasks: Tasks,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._ask = ask
        self._caches = caches
        self._loads = loads
        self._history = history
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._sources: dict[Key, _Source] = {}
        self._components: dict[tuple[str, str], _Component] = {}
        self._turns = asyncio.Semaphore(_ASKED_AT_ONCE)
        self.resyncs = 0
        """How often an instance was asked for what was missed."""

    def number(self, instance: InstanceId, model: str) -> int | None:
        """Number of the last update applied of an instance, -1 for none; None: it is not followed, or nothing is known yet."""
        source = self._sources.get((instance, model))
        return None if source is None else source.follower.number

    # Following the directory

    def refresh(self) -> None:
        """Takes up new instances and clears those that are gone."""
        present: dict[Key, Instance] = {}
        for instance in self._directory.registered():
            if instance.card.llm is not None:
                self._take_up(instance.endpoint)
                if instance.card.llm.block_size:
                    present[instance.id, instance.card.name] = instance
        for key in self._sources.keys() - present.keys():
            self._drop(self._sources.pop(key))
        for key, instance in present.items():
            if key not in self._sources:
                self._sources[key] = source = _Source(instance)
                self._catch_up(source)

    def _drop(self, source: _Source) -> None:
        if source.asking is not None:
            source.asking.cancel()
        if self._caches is not None:
            self._caches.apply(source.instance.card.name, source.instance.id, KvUpdate(0, cleared=True))

    def _take_up(self, endpoint: Endpoint) -> None:
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
        component.in_the_past = False
        for key in self.followed(endpoint):
            self._catch_up(self._sources[key])
        if self._history is not None and self._caches is not None:
            await self._history.keep_compact(endpoint, self)

    async def _subscribe(self, subject: str, callback: OnMessage) -> Subscription:
        while True:
            await self._bus.connected()
            try:
                return await self._bus.subscribe(subject, callback)
            except DynamoError as error:
                log.warning("%s cannot be followed yet: %s", subject, error)
                await asyncio.sleep(_LONGEST_PAUSE_S)

    # The past, told by the history

    def followed(self, endpoint: Endpoint) -> set[Key]:
        """The instances of a component that are followed, with their models."""
        name = _component_of(endpoint)
        return {key for key, source in self._sources.items() if _component_of(source.instance.endpoint) == name}

    def restore(self, instance: InstanceId, model: str, snapshot: KvSnapshot) -> None:
        """What an instance held once."""
        source = self._sources.get((instance, model))
        if source is not None:
            self._replace(source, snapshot)

    def apply_update(self, instance: InstanceId, model: str, update: KvUpdate) -> None:
        """An update of now or before. Those of instances that are not registered yet are dropped: they will be asked."""
        source = self._sources.get((instance, model))
        if source is not None and self._caches is not None:
            self._apply(source, source.follower.update(update))
            self._catch_up(source)

    async def fetch_snapshot(self, instance: InstanceId, model: str) -> KvSnapshot | None:
        """What an instance says that it holds; None if it cannot be asked."""
        source = self._sources.get((instance, model))
        if source is None:
            return None
        try:
            return await self._ask_snapshot(source)
        except (DynamoError, ValueError) as error:
            log.debug("instance %x did not tell its KV cache: %s", instance, error)
            return None

    # Hearing

    def on_kv(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """An update."""
        try:
            message = read_message(payload)
            instance = instance_of(subject)
        except ValueError as error:
            log.warning("a KV update on %s cannot be read: %s", subject, error)
            return
        self.apply_update(instance, message.model, message.update)
        if self._history is not None:
            self._history.count_events(subject)

    def on_load(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """A load report."""
        try:
            message = load_message_decoder.decode(payload)
            instance = instance_of(subject)
        except ValueError as error:
            log.warning("a load report on %s cannot be read: %s", subject, error)
            return
        report: LoadReport = message.report
        self._loads.report(instance, report, self._loop.time(), message.model)
        self._directory.mark_up(instance)
        source = self._sources.get((instance, message.model))
        if source is not None:
            # Updates and reports travel on different subjects but one connection: what a report speaks of came before it.
            source.follower.announced(report.kv_number)
            self._catch_up(source)

    def _apply(self, source: _Source, updates: Iterable[KvUpdate]) -> None:
        assert self._caches is not None
        for update in updates:
            self._caches.apply(source.instance.card.name, source.instance.id, update)

    def _replace(self, source: _Source, snapshot: KvSnapshot) -> None:
        assert self._caches is not None
        updates = source.follower.snapshot(snapshot)
        if updates is not None:
            self._caches.replace(source.instance.card.name, source.instance.id, snapshot)
            self._apply(source, updates)

    # Asking

    def _catch_up(self, source: _Source) -> None:
        if self._caches is None or source.asking is not None or not source.follower.is_behind:
            return
        if not self._components[_component_of(source.instance.endpoint)].in_the_past:
            source.asking = self._tasks.start(self._ask_until_exact(source), "KV resync")

    async def _ask_until_exact(self, source: _Source) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                try:
                    async with self._turns:
                        await self._ask_once(source)
                    if not source.follower.is_behind:
                        return
                except (DynamoError, ValueError) as error:
                    log.debug("instance %x did not tell its KV cache: %s", source.instance.id, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            source.asking = None

    async def _ask_once(self, source: _Source) -> None:
        self.resyncs += 1
        instance, model = source.instance, source.instance.card.name
        since = source.follower.request_from()
        if since is not None:
            question = message_encoder.encode(KvQuery(model, since))
            answer = await self._ask(instance, "events_since", question, self._loop.time() + _ANSWER_S)
            updates: Sequence[KvUpdate] | None = _updates_decoder.decode(answer)
            if updates is not None:
                self._apply(source, source.follower.recovered(updates))
                return
        self._replace(source, await self._ask_snapshot(source))

    async def _ask_snapshot(self, source: _Source) -> KvSnapshot:
        question = message_encoder.encode(KvQuery(source.instance.card.name))
        answer = await self._ask(source.instance, "snapshot", question, self._loop.time() + _ANSWER_S)
        snapshot: KvSnapshot = snapshot_decoder.decode(answer)
        return snapshot

    async def close(self) -> None:
        for component in self._components.values():
            for subscription in component.subscriptions:
                await subscription.close()


class Bookings:
    """Shares this frontend's bookings with its siblings, one message per event-loop turn, and applies theirs."""

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self._connection = connection
        self._subject = endpoint.bookings_subject()
        self._loop = asyncio.get_running_loop()
        self._waiting: list[BookingEvent] = []

    def say(self, event: BookingEvent) -> None:
        """Given to the LoadTable as `on_booking`."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(event)

    def _flush(self) -> None:
        events, self._waiting = self._waiting, []
        self._connection.publish_nowait(self._subject, message_encoder.encode(events))

    @asynccontextmanager
    async def exchanged(self, loads: LoadTable) -> AsyncIterator[None]:
        """Applies what siblings say to `loads`, and forgets siblings that fell silent, while the body runs."""

        def on_bookings(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            try:
                events: Iterable[BookingEvent] = _bookings_decoder.decode(payload)
            except msgspec.MsgspecError as error:
                log.warning("bookings on %s cannot be read: %s", subject, error)
                return
            now = self._loop.time()
            for event in events:
                loads.apply(event, now)

        async def stay_alive() -> None:
            while True:
                self.say(loads.alive())
                loads.expire_siblings(self._loop.time())
                await asyncio.sleep(_ALIVE_S)

        subscription = await self._connection.subscribe(self._subject, on_bookings)
        try:
            async with running(stay_alive(), "bookings"):
                yield
        finally:
            await subscription.close()


@asynccontextmanager
async def open_kv_feed(
    bus: Bus, directory: Directory, ask: Ask, caches: Caches | None, loads: LoadTable, history: KvHistory | None = None
) -> AsyncIterator[KvFeed]:
    """Keeps `caches` and `loads` current while the body runs. Without caches, only the loads."""
    async with running_tasks() as tasks:
        feed = KvFeed(bus, directory, ask, caches, loads, history, tasks)
        directory.on_change(feed.refresh)
        feed.refresh()
        try:
            yield feed
        finally:
            await tasks.close()
            await feed.close()
