"""Keeps a KV router in step with what instances tell about their caches and loads.

Each instance numbers its updates without holes. The feed applies them in order; when it meets a hole, a new instance, or a load
report that speaks of updates it never saw, it asks the instance: for the updates it missed, or for a snapshot of everything.
While it asks, arriving updates are dropped, for the answer will hold them or be followed by another question. So an index is
exact again a round trip after whatever was lost.

With replica sync, bookings are exchanged with the other frontends of the namespace as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import (
    KvMessage,
    KvQuestion,
    KvSnapshot,
    KvUpdate,
    LoadReport,
    kv_message_decoder,
    load_message_decoder,
    message_encoder,
    snapshot_decoder,
)
from dynamo.common.messaging.connection import Connection, Subscription
from dynamo.common.messaging.frames import Buffer
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.load import BookingEvent, LoadTable, Step

log = logging.getLogger(__name__)

Ask = Callable[[Instance, str, bytes, float], Awaitable[Buffer]]
"""`Dispatcher.ask`: one instance's answer to a question about itself."""

_ANSWER_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_ALIVE_S = 1.0
_updates_decoder = msgspec.msgpack.Decoder(list[KvUpdate] | None)
_bookings_decoder = msgspec.msgpack.Decoder(list[BookingEvent])


class Follower(Protocol):
    """What the feed keeps up to date; `router.kv.KvRouter` is one."""

    def apply(self, model: str, instance: InstanceId, update: KvUpdate) -> None: ...

    def replace(self, model: str, instance: InstanceId, snapshot: KvSnapshot) -> None: ...


class Directory(Protocol):
    """The part of `common.directory.Directory` that the feed needs."""

    def registered(self) -> Collection[Instance]: ...

    def on_change(self, callback: Callable[[], None]) -> None: ...

    def mark_up(self, instance: InstanceId) -> None: ...


class _Source:
    """One model of one instance."""

    __slots__ = ("expected", "fetching", "heard", "instance")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.expected: int | None = None
        """Number of the next update; None: nothing is known, a snapshot is needed."""
        self.heard = -1
        """Highest number that anything spoke of."""
        self.fetching: asyncio.Task[None] | None = None


class KvFeed:
    """Use `open_kv_feed`."""

    def __init__(
        self, connection: Connection, directory: Directory, ask: Ask, follower: Follower | None, loads: LoadTable
    ) -> None:
        self._connection = connection
        self._directory = directory
        self._ask = ask
        self._follower = follower
        self._loads = loads
        self._loop = asyncio.get_running_loop()
        self._sources: dict[tuple[InstanceId, str], _Source] = {}
        self._subscriptions: dict[tuple[str, str], list[Subscription]] = {}
        self._subscribing: set[asyncio.Task[None]] = set()
        self.resyncs = 0
        """How often an instance was asked for what was missed."""

    # Following the directory

    def refresh(self) -> None:
        """Takes up new instances and drops those that are gone."""
        present: dict[tuple[InstanceId, str], Instance] = {}
        endpoints: dict[tuple[str, str], Endpoint] = {}
        for instance in self._directory.registered():
            if instance.card.llm is not None:
                endpoints[instance.endpoint.namespace, instance.endpoint.component] = instance.endpoint
                if instance.card.llm.block_size:
                    present[instance.id, instance.card.name] = instance
        for key in self._sources.keys() - present.keys():
            source = self._sources.pop(key)
            if source.fetching is not None:
                source.fetching.cancel()
        for key, instance in present.items():
            if key not in self._sources:
                self._sources[key] = source = _Source(instance)
                self._fetch(source)
        for name, endpoint in endpoints.items():
            if name not in self._subscriptions:
                self._subscriptions[name] = []
                self._start(self._subscribe(name, endpoint))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._subscribing.add(task)
        task.add_done_callback(self._subscribing.discard)

    async def _subscribe(self, name: tuple[str, str], endpoint: Endpoint) -> None:
        for subject, callback in ((endpoint.kv_subject(), self.on_kv), (endpoint.load_subject(), self.on_load)):
            self._subscriptions[name].append(await self._connection.subscribe(subject, callback))

    # Hearing

    def on_kv(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """An update. Those of instances that are not registered yet are dropped: a snapshot will be asked for."""
        message: KvMessage
        try:
            message = kv_message_decoder.decode(payload)
            source = self._sources.get((_instance_of(subject), message.model))
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("a KV update on %s cannot be read: %s", subject, error)
            return
        if source is None or self._follower is None:
            return
        number = message.update.number
        source.heard = max(source.heard, number)
        if source.fetching is not None or source.expected is None or number < source.expected:
            return
        if number > source.expected:
            self._fetch(source)
            return
        source.expected = number + 1
        self._follower.apply(message.model, source.instance.id, message.update)

    def on_load(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """A load report."""
        try:
            message = load_message_decoder.decode(payload)
            instance = _instance_of(subject)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("a load report on %s cannot be read: %s", subject, error)
            return
        report: LoadReport = message.report
        self._loads.report(instance, report, self._loop.time())
        self._directory.mark_up(instance)
        source = self._sources.get((instance, message.model))
        if source is None or source.fetching is not None:
            return
        # Updates and reports travel on different subjects but one connection: what a report speaks of came before it.
        source.heard = max(source.heard, report.kv_number)
        if source.expected is None or report.kv_number >= source.expected:
            self._fetch(source)

    def reconnected(self) -> None:
        """Whatever was published while we were away is lost."""
        for source in self._sources.values():
            self._fetch(source)

    # Asking

    def _fetch(self, source: _Source) -> None:
        if source.fetching is None and self._follower is not None:
            source.fetching = asyncio.create_task(self._catch_up(source), name="kv resync")

    async def _catch_up(self, source: _Source) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                try:
                    await self._ask_once(source)
                    if source.expected is not None and source.heard < source.expected:
                        return
                except (DynamoError, msgspec.MsgspecError) as error:
                    log.debug("instance %x did not tell its KV cache: %s", source.instance.id, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            source.fetching = None

    async def _ask_once(self, source: _Source) -> None:
        assert self._follower is not None
        self.resyncs += 1
        instance, model = source.instance, source.instance.card.name
        deadline = self._loop.time() + _ANSWER_S
        if source.expected is not None:
            question = message_encoder.encode(KvQuestion(model, source.expected))
            updates = _updates_decoder.decode(await self._ask(instance, "events_since", question, deadline))
            if updates is not None:
                for update in updates:
                    if update.number == source.expected:
                        self._follower.apply(model, instance.id, update)
                        source.expected += 1
                return
        question = message_encoder.encode(KvQuestion(model))
        snapshot = snapshot_decoder.decode(await self._ask(instance, "snapshot", question, deadline))
        self._follower.replace(model, instance.id, snapshot)
        source.expected = snapshot.number + 1

    async def close(self) -> None:
        tasks = [source.fetching for source in self._sources.values() if source.fetching is not None]
        for task in [*tasks, *self._subscribing]:
            task.cancel()
        await asyncio.gather(*tasks, *self._subscribing, return_exceptions=True)
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                await subscription.close()


def _instance_of(subject: str) -> InstanceId:
    return InstanceId(int(subject.rsplit(".", 1)[1], 16))


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
                self.say(BookingEvent(loads.origin, Step.ALIVE))
                loads.expire_siblings(self._loop.time())
                await asyncio.sleep(_ALIVE_S)

        subscription = await self._connection.subscribe(self._subject, on_bookings)
        alive = asyncio.create_task(stay_alive(), name="bookings")
        try:
            yield
        finally:
            alive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await alive
            await subscription.close()


@asynccontextmanager
async def open_kv_feed(
    connection: Connection, directory: Directory, ask: Ask, follower: Follower | None, loads: LoadTable
) -> AsyncIterator[KvFeed]:
    """Keeps `follower` and `loads` current while the body runs. Without a follower, only the loads."""
    feed = KvFeed(connection, directory, ask, follower, loads)
    directory.on_change(feed.refresh)
    connection.on_reconnect(feed.reconnected)
    feed.refresh()
    try:
        yield feed
    finally:
        await feed.close()
