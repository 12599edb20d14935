"""Following a publisher that speaks as vLLM's does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq.asyncio

from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.worker.kv.vllm_subscriber import KvFollower, following
from tests.support.vllm_publisher import VllmPublisher, batch, block, removed, stored
from tests.support.waiting import until


class Followed:
    def __init__(self, publisher: VllmPublisher, kv: KvState, follower: KvFollower) -> None:
        self.publisher = publisher
        self.replaying: asyncio.Task[None] | None = None
        self.kv = kv
        self.follower = follower

    async def restart(self) -> None:
        """Restart the publisher."""
        if self.replaying is not None:
            self.replaying.cancel()
        self.publisher.restart()
        self.replaying = asyncio.create_task(self.publisher.serve_replays())
        await self.publisher.followed()

    async def holds(self, blocks: Iterable[int]) -> None:
        wanted = set(blocks)
        await until(lambda: set(self.kv.held()) == wanted)


@asynccontextmanager
async def followed(folder: Path, *before: bytes) -> AsyncIterator[Followed]:
    kv = KvState()
    with zmq.asyncio.Context() as context, closing(VllmPublisher(folder, context)) as publisher:
        for payload in before:
            await publisher.publish(payload)
        replaying = asyncio.create_task(publisher.serve_replays())
        async with following(publisher.source, kv, lambda: None) as follower:
            await publisher.followed()
            state = Followed(publisher, kv, follower)
            state.replaying = replaying
            try:
                yield state
            finally:
                state.replaying.cancel()


async def test_earlier_events_are_replayed_at_the_start(tmp_path: Path) -> None:
    async with followed(tmp_path, batch(stored(100)), batch(stored(200), removed(100))) as f:
        assert set(f.kv.held()) == {block(200)}
        await f.publisher.publish(batch(stored(300)))
        await f.holds({block(200), block(300)})


async def test_a_lost_batch_is_requested_again(tmp_path: Path) -> None:
    async with followed(tmp_path) as f:
        await f.publisher.publish(batch(stored(100)))
        await f.holds({block(100)})
        await f.publisher.publish(batch(removed(100)), lost=True)
        await f.publisher.publish(batch(stored(200)), lost=True)
        await f.publisher.publish(batch(stored(300)))
        await f.holds({block(200), block(300)})
        assert f.publisher.requested == [0, 1]
        assert f.follower.lost == 0


async def test_an_unrecoverable_gap_clears_the_cache_view(tmp_path: Path) -> None:
    async with followed(tmp_path) as f:
        await f.publisher.publish(batch(stored(100)))
        await f.holds({block(100)})
        await f.publisher.publish(batch(removed(100)), lost=True, kept=False)
        f.publisher.kept.clear()
        await f.publisher.publish(batch(stored(200)))
        await f.holds({block(200)})
        assert f.follower.lost == 1


async def test_an_engine_that_was_restarted_has_an_empty_cache(tmp_path: Path) -> None:
    async with followed(tmp_path) as f:
        await f.publisher.publish(batch(stored(100)))
        await f.publisher.publish(batch(stored(200)))
        await f.holds({block(100), block(200)})
        await f.restart()
        await f.publisher.publish(batch(stored(300)))
        await f.holds({block(300)})
        await f.restart()
        await f.publisher.publish(batch(stored(400)), lost=True)
        await f.publisher.publish(batch(stored(500)), lost=True)
        await f.publisher.publish(batch(stored(600)))
        await f.holds({block(400), block(500), block(600)})


async def test_a_cleared_cache_and_an_odd_batch_do_not_stop_it(tmp_path: Path) -> None:
    async with followed(tmp_path) as f:
        await f.publisher.publish(batch(stored(100)))
        await f.publisher.publish(b"\xc1")
        await f.publisher.publish(batch({"type": "AllBlocksCleared"}, stored(200)))
        await f.holds({block(200)})


async def test_a_copy_in_host_memory_outlives_that_on_the_gpu(tmp_path: Path) -> None:
    async with followed(tmp_path) as f:
        await f.publisher.publish(batch(stored(100), stored(100) | {"medium": "CPU"}))
        await f.publisher.publish(batch(removed(100), stored(200)))
        await f.holds({block(200)})
        assert set(f.kv.held(Tier.CPU)) == {block(100)}


@pytest.mark.parametrize(
    "parts",
    [
        (b"x",),
        (b"", b"x"),
        (b"", b"\0" * 7, b"x"),
        (b"", b"\xff" * 9, b"x"),
        (b"", b"\x7f" * 8, b"x"),
        (b"", b"1" * 100_000, b"x"),
    ],
)
async def test_a_message_that_is_no_batch_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: list[bytes]
) -> None:
    async with followed(tmp_path) as f:
        for _ in range(3):
            await f.publisher.publish_parts(*parts)
        await f.publisher.publish(batch(stored(100)), lost=True)
        await f.publisher.publish(batch(stored(200)))
        await f.holds({block(100), block(200)})
        assert f.publisher.requested == [0, 0]
    assert caplog.text.count("publishes what are no KV events") == 1


async def test_a_publisher_that_is_never_silent_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    turns, taken = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with zmq.asyncio.Context() as context, closing(VllmPublisher(tmp_path, context)) as publisher:
        replaying = asyncio.create_task(publisher.serve_replays())
        async with following(publisher.source, KvState(), lambda: taken.update([turns])):
            await publisher.followed()
            counting = asyncio.create_task(count_turns())
            for number in range(500):
                await publisher.publish(batch(stored(number)))
            await until(lambda: taken.total() > 500)
            counting.cancel()
        replaying.cancel()
    assert max(taken.values()) < 10


async def test_a_long_batch_leaves_turns_of_the_event_loop_to_others(tmp_path: Path) -> None:
    kv, held = KvState(), Counter[int]()

    async def look() -> None:
        while True:
            held[len(kv)] += 1
            await asyncio.sleep(0)

    with zmq.asyncio.Context() as context, closing(VllmPublisher(tmp_path, context)) as publisher:
        replaying = asyncio.create_task(publisher.serve_replays())
        async with following(publisher.source, kv, lambda: None):
            await publisher.followed()
            looking = asyncio.create_task(look())
            await publisher.publish(batch(*[stored(first, 2_000) for first in range(0, 80_000, 8_000)]))
            await until(lambda: len(kv) == 20_000)
            looking.cancel()
        replaying.cancel()
    assert len(held) > 20


async def test_a_batch_is_applied_whole_though_the_time_for_its_replay_passes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, passed = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed)

    class SlowState(KvState):
        def store(self, blocks: Iterable[int], rank: int = 0, tier: Tier = Tier.GPU) -> None:
            nonlocal passed
            passed += 1.0
            super().store(blocks, rank, tier)

    kv = SlowState()
    with zmq.asyncio.Context() as context, closing(VllmPublisher(tmp_path, context)) as publisher:
        await publisher.publish(batch(*[stored(first, 2_000) for first in range(0, 80_000, 8_000)]))
        replaying = asyncio.create_task(publisher.serve_replays())
        async with following(publisher.source, kv, lambda: None):
            assert passed > 2 * publisher.source.replay_timeout_s
            assert len(kv) == 20_000
        replaying.cancel()


async def test_blocks_on_an_unknown_medium_are_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with followed(tmp_path) as f:
        for first in (100, 200):
            await f.publisher.publish(batch(stored(first, 2) | {"medium": "TAPE"}))
        await f.publisher.publish(batch(stored(300)))
        await f.holds({block(300)})
        assert f.kv.unknown == 4
    assert caplog.text.count("a medium that is unknown") == 1


async def test_a_publisher_without_replay_is_followed(tmp_path: Path) -> None:
    kv = KvState()
    with zmq.asyncio.Context() as context, closing(VllmPublisher(tmp_path, context)) as publisher:
        async with following(replace(publisher.source, replay_timeout_s=0.05), kv, lambda: None):
            await publisher.followed()
            await publisher.publish(batch(stored(100)))
            await until(lambda: block(100) in kv)
