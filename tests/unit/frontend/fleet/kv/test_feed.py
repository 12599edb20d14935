"""The feed and the publishers of workers over a bad bus, in virtual time: whatever happens, the index is exact in the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.discovery import Instance
from dynamo.common.errors import InstanceGone, Unavailable
from dynamo.common.kv.events import MAX_UPDATE_BLOCKS, KvMessage, KvSnapshot, KvUpdate, message_encoder
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.kv.tiers import Tier, TierChange
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.messaging.request_plane.frames import joined
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import InstanceId
from dynamo.frontend.fleet.kv.archive import Archive
from dynamo.frontend.fleet.kv.feed import KvFeed, open_kv_feed
from dynamo.frontend.fleet.kv.follow import Follower
from dynamo.frontend.fleet.kv.history import KvHistory
from dynamo.frontend.router.kv import KvRouter
from dynamo.worker.process.publisher import KvPublishers, publishing
from tests.support.bad_bus import BadBus, CachingEngine
from tests.support.fakes import ENDPOINT, FakeDirectory, instance
from tests.support.virtual_time import in_virtual_time, run

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="t", block_size=16))


class Nats:
    """A bus that is good, with a record of KV events that can fail."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[str, OnMessage]] = []
        self.is_away = False
        """For frontends."""
        self.record = Record()

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        if not self.is_away:
            for pattern, on_message in list(self._subscribers):
                if fnmatchcase(subject, pattern):
                    on_message(subject, reply, memoryview(payload), False)
        if reply and self.record.is_there:
            self.record.add(subject, payload, reply)
        return True

    async def connected(self) -> None:
        pass

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        self._subscribers.append((subject, on_message))
        return Subscription(self._subscribers, (subject, on_message))


@dataclass
class Subscription:
    among: list[tuple[str, OnMessage]]
    own: tuple[str, OnMessage]

    async def close(self) -> None:
        self.among.remove(self.own)


class Record:
    """JetStream, in memory."""

    def __init__(self) -> None:
        self.is_there = True
        self.made = 0
        self.events: list[tuple[int, str, bytes]] = []
        self.snapshots: dict[str, bytes] = {}
        self._last = 0
        self._receipts: dict[str, Callable[[str], None]] = {}
        self._locked: set[str] = set()

    def add(self, subject: str, payload: bytes, reply: str) -> None:
        self._last += 1
        self.events.append((self._last, subject, payload))
        for prefix, on_recorded in list(self._receipts.items()):
            if reply.startswith(f"{prefix}."):
                on_recorded(reply.removeprefix(f"{prefix}."))

    def _check(self) -> None:
        if not self.is_there:
            raise Unavailable("no JetStream")

    async def ensure(self) -> str:
        self._check()
        return str(self.made)

    def lose(self) -> None:
        """It is there again at once, and empty but for its snapshots, which are of before."""
        self.events.clear()
        self._last = 0
        self.made += 1

    @asynccontextmanager
    async def receipts(self, on_recorded: Callable[[str], None]) -> AsyncIterator[str]:
        name = f"_INBOX{len(self._receipts)}"
        self._receipts[name] = on_recorded
        yield name

    async def count(self, subject: str) -> int:
        self._check()
        return sum(fnmatchcase(each, subject) for _, each, _ in self.events)

    async def since(self, subject: str, after: int) -> AsyncGenerator[list[tuple[int, str, bytes]], None]:
        self._check()
        after = after if after <= self._last else 0
        found = [event for event in self.events if event[0] > after and fnmatchcase(event[1], subject)]
        for start in range(0, len(found), 3):
            await asyncio.sleep(0.001)
            self._check()
            yield found[start : start + 3]

    async def purge(self, subject: str, up_to: int | None = None) -> None:
        self._check()
        self.events = [event for event in self.events if up_to is not None and event[0] > up_to]

    async def load(self, name: str) -> bytes | None:
        self._check()
        return self.snapshots.get(name)

    async def save(self, name: str, snapshot: bytes) -> None:
        self._check()
        self.snapshots[name] = snapshot

    async def forget(self, name: str) -> None:
        self._check()
        self.snapshots.pop(name, None)

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[bool]:
        self._check()
        free = name not in self._locked
        self._locked.add(name)
        try:
            yield free
        finally:
            if free:
                self._locked.remove(name)


class Directory(FakeDirectory):
    def mark_up(self, instance: InstanceId) -> None:
        pass


@dataclass
class Question:
    body: Buffer
    response: bytes = b""

    def end(self, body: Body = b"") -> None:
        self.response = bytes(joined(body))


@dataclass
class Worker:
    instance: Instance
    engine: CachingEngine
    bus: BadBus
    publishers: KvPublishers
    life: AsyncExitStack


@dataclass
class World:
    """Workers, and one frontend at a time."""

    rng: Random
    durable: bool = False
    threshold: int = 20
    nats: Nats = field(default_factory=Nats)
    directory: Directory = field(default_factory=Directory)
    workers: list[Worker] = field(default_factory=list)
    silent: float = 0.0
    """Share of the questions that fail."""
    lost: float = 0.2
    log_bytes: tuple[int, ...] = (300, 1000, 1 << 20)
    """Sizes of the log of updates that an engine keeps: one of these."""
    feed: KvFeed | None = None
    history: KvHistory | None = None
    router: KvRouter = field(default_factory=KvRouter)
    _front: AsyncExitStack = field(default_factory=AsyncExitStack)
    _ids: int = 0

    async def add_worker(self) -> Worker:
        self._ids += 1
        known = instance(self._ids, CARD)
        engine = CachingEngine(self.rng, self.rng.choice(self.log_bytes))
        bus = BadBus(self.nats.publish, self.rng, lost=self.lost)
        life = AsyncExitStack()
        record = self.nats.record if self.durable else None
        publishers = await life.enter_async_context(publishing(bus, ENDPOINT, known.id, [("m", engine)], record))
        worker = Worker(known, engine, bus, publishers, life)
        self.workers.append(worker)
        self.directory.add(known)
        return worker

    async def remove_worker(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.directory.remove(worker.instance.id)
        await worker.life.aclose()

    async def start_frontend(self, *, reset: bool = False) -> None:
        await self._front.aclose()
        self.router = KvRouter()
        record = self.nats.record
        self.history = KvHistory(record, snapshot_threshold=self.threshold, reset=reset) if self.durable else None
        opened = open_kv_feed(self.nats, self.directory, self.ask, self.router, self.router.loads, self.history)
        self.feed = await self._front.enter_async_context(opened)

    async def ask(self, instance: Instance, verb: str, body: bytes, deadline: float) -> Buffer:
        await asyncio.sleep(self.rng.random() * 0.1)
        worker = next((each for each in self.workers if each.instance.id == instance.id), None)
        if worker is None or self.nats.is_away or self.rng.random() < self.silent:
            raise InstanceGone(instance.id)
        question = Question(body)
        await worker.publishers.handlers[verb](question)  # type: ignore[arg-type]
        await asyncio.sleep(self.rng.random() * 0.1)
        if self.rng.random() < self.silent:
            raise InstanceGone(instance.id)
        return question.response

    def be_good(self) -> None:
        self.silent = 0.0
        self.nats.record.is_there = True
        self.nats.is_away = False
        for worker in self.workers:
            worker.bus.be_good()

    def assert_exact(self) -> None:
        held = {(worker.instance.id, tier): worker.engine.held(tier) for worker in self.workers for tier in Tier}
        for number in range(1, self._ids + 1):
            known = InstanceId(number)
            for tier in Tier:
                assert self.router.index("m").held(known, tier) == held.get((known, tier), set())

    async def assert_exact_by_record(self) -> None:
        """Start a frontend to which no worker responds: what it knows is from the record."""
        self.silent = 1.0
        await self.start_frontend()
        await asyncio.sleep(0.5)
        self.assert_exact()

    async def close(self) -> None:
        await self._front.aclose()
        for worker in list(self.workers):
            await self.remove_worker(worker)


@asynccontextmanager
async def world(rng: Random | None = None, *, workers: int = 2, durable: bool = False, lost: float = 0.0) -> AsyncIterator[World]:
    found = World(rng or Random(1), durable, lost=lost)
    for _ in range(workers):
        await found.add_worker()
    if not lost:
        found.be_good()
    try:
        yield found
    finally:
        await found.close()


async def something_happens(w: World) -> None:
    rng = w.rng
    match rng.choices(("step", "wait", "worker", "frontend", "lease", "link", "record"), (60, 20, 2, 2, 3, 3, 3))[0]:
        case "step":
            rng.choice(w.workers).engine.step()
        case "wait":
            await asyncio.sleep(rng.random() * 0.4)
        case "worker":
            await w.remove_worker(rng.choice(w.workers))
            await w.add_worker()
        case "frontend":
            await w.start_frontend(reset=rng.random() < 0.2)
        case "lease":  # it came back under the same name
            known = rng.choice(w.workers).instance
            w.directory.remove(known.id)
            await asyncio.sleep(rng.random() * 0.1)
            w.directory.add(known)
        case "link":
            w.nats.is_away = not w.nats.is_away
        case _:
            w.nats.record.is_there = not w.nats.record.is_there
            if rng.random() < 0.2:
                w.nats.record.lose()
            if rng.random() < 0.3:
                w.nats.record.events = w.nats.record.events[rng.randrange(10) :]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 150), st.booleans(), st.sampled_from([0.0, 0.1, 0.4]))
def test_after_a_quiet_second_the_index_equals_the_workers_own_copies(
    seed: int, events: int, durable: bool, silent: float
) -> None:
    async def main() -> None:
        async with world(Random(seed), workers=3, durable=durable, lost=0.25) as w:
            w.silent = silent
            await w.start_frontend()
            for _ in range(events):
                await something_happens(w)
            w.be_good()
            await asyncio.sleep(0.3)  # what was delayed arrives; from here on nothing is lost
            for worker in w.workers:
                worker.engine.step()
            await asyncio.sleep(1.0)
            w.assert_exact()

    run(main())


# The record


@in_virtual_time
async def test_a_frontend_that_starts_is_exact_from_the_record_though_no_peer_answers() -> None:
    async with world(durable=True) as w:
        w.threshold = 1000
        for _ in range(100):
            w.workers[0].engine.step()
            w.workers[1].engine.step()
            await asyncio.sleep(0.01)
        await w.assert_exact_by_record()
        assert w.feed is not None
        assert w.feed.resyncs == 0
        w.workers[0].engine.step()
        w.assert_exact()


@in_virtual_time
async def test_a_snapshot_takes_the_place_of_what_is_on_record() -> None:
    async with world(durable=True) as w:
        w.threshold = 50
        await w.start_frontend()
        for _ in range(200):
            w.workers[0].engine.step()
            w.workers[1].engine.step()
            await asyncio.sleep(0.01)
        assert w.history is not None
        assert w.history.snapshots >= 2
        assert len(w.nats.record.events) <= 100
        gone = w.workers[1]
        await w.remove_worker(gone)
        await w.assert_exact_by_record()
        assert w.router.index("m").held(gone.instance.id) == set()


@in_virtual_time
async def test_a_hole_in_the_record_is_requested_when_a_snapshot_is_made() -> None:
    async with world(durable=True, workers=1) as w:
        w.threshold = 30
        await w.start_frontend()
        while len(w.nats.record.events) < 29:
            w.workers[0].engine.step()
            await asyncio.sleep(0.01)
        del w.nats.record.events[0]  # the update that told everything
        while not w.nats.record.snapshots:
            w.workers[0].engine.step()
            await asyncio.sleep(0.01)
        await w.assert_exact_by_record()


@in_virtual_time
async def test_a_hole_in_the_record_makes_a_frontend_ask() -> None:
    async with world(durable=True, workers=1) as w:
        w.threshold = 1000
        for _ in range(20):
            w.workers[0].engine.step()
            await asyncio.sleep(0.01)
        del w.nats.record.events[len(w.nats.record.events) // 2]
        await w.start_frontend()
        await asyncio.sleep(0.5)
        w.assert_exact()
        assert w.feed is not None
        assert w.feed.resyncs == 1


@in_virtual_time
async def test_what_was_recorded_before_a_reset_is_forgotten() -> None:
    async with world(durable=True, workers=1) as w:
        w.threshold = 10
        await w.start_frontend()
        for _ in range(30):
            w.workers[0].engine.step()
            await asyncio.sleep(0.01)
        assert w.nats.record.snapshots
        w.silent = 1.0
        await w.start_frontend(reset=True)
        await asyncio.sleep(0.5)
        assert not w.nats.record.snapshots
        assert not w.nats.record.events
        assert w.router.index("m").held(w.workers[0].instance.id) == set()


@in_virtual_time
async def test_without_a_record_snapshots_are_requested_and_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with world(durable=False) as w:
            w.durable = True
            w.nats.record.is_there = False
            w.workers[0].engine.step()
            await w.start_frontend()
            await asyncio.sleep(0.5)
            w.assert_exact()
    assert "cannot be used; requesting snapshots from the instances: no JetStream" in caplog.text


@in_virtual_time
async def test_a_record_that_hangs_is_not_waited_for() -> None:
    class Hanging(Record):
        async def load(self, name: str) -> bytes | None:
            await asyncio.sleep(1000)
            return None

    async with world(durable=True) as w:
        w.nats.record = Hanging()
        w.workers[0].engine.step()
        await w.start_frontend()
        await asyncio.sleep(1.3)
        w.assert_exact()


@in_virtual_time
async def test_events_that_were_not_recorded_in_time_are_published_again() -> None:
    async with world(durable=True, workers=1) as w:
        w.nats.record.is_there = True
        worker = w.workers[0]
        await asyncio.sleep(0.1)
        w.nats.record.is_there = False
        for _ in range(5):
            worker.engine.step()
        w.nats.record.is_there = True
        await asyncio.sleep(4)
        await w.assert_exact_by_record()


@in_virtual_time
async def test_however_many_events_a_stalled_record_has_missed_it_is_complete_again_soon() -> None:
    async with world(durable=True, workers=0) as w:
        w.log_bytes = (1 << 24,)
        worker = await w.add_worker()
        w.be_good()
        await asyncio.sleep(0.1)
        w.nats.record.is_there = False
        while worker.engine.kv.number < 1500:
            worker.engine.step()
        w.nats.record.is_there = True
        await asyncio.sleep(4)  # for the receipts to be late, and a second to repeat what has none
        w.silent = 1.0
        await w.start_frontend()
        await asyncio.sleep(1.5)
        w.assert_exact()


@in_virtual_time
async def test_a_record_that_was_lost_is_begun_anew_with_everything() -> None:
    async with world(durable=True, workers=1) as w:
        worker = w.workers[0]
        await w.start_frontend()
        while not w.nats.record.snapshots:
            worker.engine.step()
            await asyncio.sleep(0.01)
        w.nats.record.is_there = False
        worker.engine.step()
        w.nats.record.lose()
        await asyncio.sleep(5)  # the worker misses a receipt, and finds another record
        w.nats.record.is_there = True
        await asyncio.sleep(5)
        await w.assert_exact_by_record()


@in_virtual_time
async def test_a_worker_that_missed_no_receipt_notices_a_lost_record_all_the_same() -> None:
    async with world(durable=True, workers=1) as w:
        w.workers[0].engine.step()
        await asyncio.sleep(0.1)
        w.nats.record.lose()
        await asyncio.sleep(70)
        await w.assert_exact_by_record()


@in_virtual_time
async def test_a_record_that_was_made_anew_is_complete_soon_after_a_worker_is_connected_again() -> None:
    async with world(durable=True, workers=1) as w:
        w.workers[0].engine.step()
        await asyncio.sleep(0.1)
        w.nats.record.lose()
        w.workers[0].bus.reconnected_at = asyncio.get_running_loop().time()
        await asyncio.sleep(2)
        await w.assert_exact_by_record()


@in_virtual_time
async def test_a_damaged_event_counts_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with world(workers=1) as w:
        await w.start_frontend()
        await asyncio.sleep(0.5)
        worker = w.workers[0]
        worker.engine.kv.store([1, 2])
        lost = worker.engine.kv.take_update()
        assert lost is not None
        damaged = KvUpdate(lost.number, lost.stored[:-1])
        subject = ENDPOINT.kv_subject(worker.instance.id)
        w.nats.publish(subject, message_encoder.encode(KvMessage("m", damaged)))
        w.nats.publish(ENDPOINT.kv_subject() + "x", b"")
        await asyncio.sleep(1.0)
        w.assert_exact()


@pytest.mark.parametrize("kept", ["event", "snapshot"])
@in_virtual_time
async def test_a_frontend_starts_though_what_is_on_record_is_nested_too_deeply(kept: str) -> None:
    async with world(durable=True) as w:
        subject = ENDPOINT.kv_subject(w.workers[0].instance.id)
        if kept == "event":
            w.nats.record.add(subject, nested(KvMessage("m", KvUpdate(1, b""))), "")
        else:
            await w.nats.record.save(ENDPOINT.kv_subject().rpartition(".")[0], nested(Archive()))
        w.workers[0].engine.step()
        await w.start_frontend()
        await asyncio.sleep(5.0)
        w.assert_exact()


def nested(value: msgspec.Struct) -> bytes:
    """A message of a struct that is an array, with arrays of arrays in place of a field that a later version may add."""
    first, *rest = message_encoder.encode(value)
    return bytes((first + 1, *rest)) + b"\x91" * 10_000 + b"\xc0"


# Doing without events


@in_virtual_time
async def test_while_events_are_dropped_caches_are_unknown_and_instances_are_queried_only_afterwards() -> None:
    async with world(workers=3) as w:
        await w.start_frontend()
        await asyncio.sleep(1.0)
        assert w.feed is not None
        resyncs = w.feed.resyncs
        w.feed.suspend()
        w.nats.is_away = True
        for _ in range(20):
            for worker in w.workers:
                worker.engine.step()
            await asyncio.sleep(0.1)
        await w.add_worker()
        w.be_good()
        await asyncio.sleep(2.0)  # load reports name updates that never came
        assert not w.router.uses_index
        assert w.feed.resyncs == resyncs
        w.feed.resume()
        assert not w.router.uses_index
        await asyncio.sleep(0.5)
        assert w.router.uses_index
        assert w.feed.resyncs == resyncs + 4
        w.assert_exact()


@in_virtual_time
async def test_the_caches_are_used_again_though_an_instance_does_not_respond() -> None:
    async with world(workers=2) as w:
        await w.start_frontend()
        await asyncio.sleep(1.0)
        assert w.feed is not None
        w.feed.suspend()
        w.silent = 1.0
        w.feed.resume()
        await asyncio.sleep(1.0)
        assert w.router.uses_index


@in_virtual_time
async def test_an_update_with_a_number_beyond_all_that_can_be_said_is_dropped() -> None:
    """What follows the last number of MessagePack could not be requested: that ended the frontend."""
    async with world(workers=1) as w:
        await w.start_frontend()
        await asyncio.sleep(1.0)
        assert w.feed is not None
        [worker] = w.workers
        last = message_encoder.encode((CARD.name, (2**64 - 1, b"", b"", True)))
        w.nats.publish(ENDPOINT.kv_subject(worker.instance.id), last)
        w.feed.suspend()
        w.feed.resume()
        await asyncio.sleep(1.0)
        assert w.router.uses_index
        w.assert_exact()


@pytest.mark.parametrize(("verb", "response"), [("events_since", [[0]] * (2**16 + 1)), ("snapshot", [7, b"", [["disk"]] * 9])])
@in_virtual_time
async def test_a_response_of_more_parts_than_an_instance_can_mean_is_not_read(verb: str, response: object) -> None:
    """Thirty million empty updates in one response held a frontend for more than 30 s, and took 2.8 GB."""
    queried: list[str] = []

    async def query(instance: Instance, asked: str, body: Body, deadline: float) -> Buffer:
        queried.append(asked)
        return message_encoder.encode(response if asked == verb else None)

    caches = KvRouter()
    async with open_kv_feed(Nats(), Directory(instance(1, CARD)), query, caches, caches.loads) as feed:
        if verb == "events_since":
            feed.apply_update(InstanceId(1), "m", KvUpdate(0))
            feed.apply_update(InstanceId(1), "m", KvUpdate(5))
        await asyncio.sleep(1.0)
        assert queried.count(verb) > 1
        assert feed.number(InstanceId(1), "m") == (0 if verb == "events_since" else None)


@in_virtual_time
async def test_however_many_queries_are_due_they_begin_at_a_bounded_rate() -> None:
    begun: list[float] = []
    open_queries = most = 0

    async def query(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        nonlocal open_queries, most
        open_queries += 1
        most = max(most, open_queries)
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        open_queries -= 1
        return message_encoder.encode(KvSnapshot(number=0, blocks=b""))

    router = KvRouter()
    directory = Directory(*(instance(number, CARD) for number in range(1, 1001)))
    async with open_kv_feed(Nats(), directory, query, router, router.loads):
        await asyncio.sleep(30)
    assert len(begun) == 1000
    assert most <= 32
    assert max(sum(at <= each < at + 1.0 for each in begun) for at in begun) <= 32 + 200 + 1


@asynccontextmanager
async def following(
    card: ModelCard, caches: KvRouter, left_out: Callable[[str, int], None] = lambda model, blocks: None
) -> AsyncIterator[tuple[KvFeed, Callable[[KvUpdate], None]]]:
    """A feed of one instance that responds to no query, and what hands an update of it to the feed."""

    async def query(known: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        raise InstanceGone(known.id)

    async with open_kv_feed(Nats(), Directory(instance(1, card)), query, caches, caches.loads, on_left_out=left_out) as feed:

        def publish(update: KvUpdate) -> None:
            payload = message_encoder.encode(KvMessage("m", update))
            feed.on_kv(ENDPOINT.kv_subject(InstanceId(1)), "", memoryview(payload), False)

        yield feed, publish


def invented(count: int, begin: int = 1) -> bytes:
    return pack_hashes(range(begin, begin + count))


@in_virtual_time
async def test_an_update_with_more_blocks_than_one_has_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    router = KvRouter()
    async with following(CARD, router) as (feed, publish):
        publish(KvUpdate(0, invented(MAX_UPDATE_BLOCKS + 1), cleared=True))
        await asyncio.sleep(1.0)
        assert (router.held_blocks("m", InstanceId(1)), feed.number(InstanceId(1), "m")) == (0, None)
    assert "it has 65537 blocks; at most 65536 are allowed" in caplog.text


@in_virtual_time
async def test_an_update_with_many_blocks_is_applied_in_steps_and_those_after_it_wait() -> None:
    router, first = KvRouter(), InstanceId(1)
    async with following(CARD, router) as (_, publish):
        publish(KvUpdate(0, invented(MAX_UPDATE_BLOCKS), cleared=True))
        publish(KvUpdate(1, removed=invented(MAX_UPDATE_BLOCKS - 3)))
        publish(KvUpdate(2, invented(1, begin=MAX_UPDATE_BLOCKS + 1)))
        largest_step = held = 0
        for _ in range(300):
            await asyncio.sleep(0)
            largest_step = max(largest_step, abs(router.held_blocks("m", first) - held))
            held = router.held_blocks("m", first)
        assert largest_step == 1024
        assert router.index("m").held(first) == set(range(MAX_UPDATE_BLOCKS - 2, MAX_UPDATE_BLOCKS + 2))


@in_virtual_time
async def test_of_one_instance_no_more_blocks_are_kept_than_some_times_what_its_card_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert CARD.llm is not None
    card = msgspec.structs.replace(CARD, llm=msgspec.structs.replace(CARD.llm, total_blocks=10_000))
    router, first, left_out = KvRouter(), InstanceId(1), Counter[str]()
    async with following(card, router, lambda model, blocks: left_out.update({model: blocks})) as (_, publish):
        for number in range(5):
            publish(KvUpdate(number, invented(60_000, begin=1 + number * 60_000), cleared=number == 0))
            await asyncio.sleep(1.0)
        assert (router.held_blocks("m", first), left_out) == (160_000, {"m": 140_000})
        assert caplog.text.count("160000 blocks are kept") == 1
        publish(KvUpdate(5, invented(3, begin=10**6), invented(60_000)))
        await asyncio.sleep(1.0)
        assert router.held_blocks("m", first) == 100_003


@in_virtual_time
async def test_blocks_of_slow_tiers_are_applied_in_steps_and_bounded_like_those_of_the_gpu() -> None:
    assert CARD.llm is not None
    card = msgspec.structs.replace(CARD, llm=msgspec.structs.replace(CARD.llm, total_blocks=10_000))
    router, first, left_out = KvRouter(), InstanceId(1), Counter[str]()
    async with following(card, router, lambda model, blocks: left_out.update({model: blocks})) as (_, publish):
        for number in range(4):
            tiers = (TierChange("cpu", invented(30_000, begin=1 + number * 30_000)), TierChange("shared", invented(20_000)))
            publish(KvUpdate(number, cleared=number == 0, tiers=tiers))
            await asyncio.sleep(1.0)
        index = router.index("m")
        assert (len(index.held(first, Tier.CPU)), len(index.held(first, Tier.SHARED))) == (120_000, 20_000)
        publish(KvUpdate(4, tiers=(TierChange("cpu", removed=invented(60_000)),)))
        publish(KvUpdate(5, tiers=(TierChange("cpu", invented(64_000, begin=10**6)),)))
        publish(KvUpdate(6, tiers=(TierChange("cpu", invented(64_000, begin=10**7)),)))
        await asyncio.sleep(1.0)
        assert (router.held_blocks("m", first), left_out) == (160_000, {"m": 48_000})


@in_virtual_time
async def test_updates_that_come_faster_than_they_are_applied_count_as_lost() -> None:
    router, first = KvRouter(), InstanceId(1)
    async with following(CARD, router) as (feed, publish):
        for number in range(50):
            publish(KvUpdate(number, invented(MAX_UPDATE_BLOCKS, begin=1 + number * MAX_UPDATE_BLOCKS), cleared=number == 0))
        await asyncio.sleep(1.0)
        assert router.held_blocks("m", first) == 8 * MAX_UPDATE_BLOCKS
        assert feed.resyncs > 0


def test_kept_updates_are_bounded_in_bytes() -> None:
    follower = Follower()
    follower.snapshot(KvSnapshot())
    for number in range(1, 100):
        assert follower.update(KvUpdate(number, invented(MAX_UPDATE_BLOCKS))) == []
    ready = follower.recovered([KvUpdate(number) for number in range(84)])
    assert [update.number for update in ready] == list(range(100))
    assert [len(update.stored) > 0 for update in ready].count(True) == 16
