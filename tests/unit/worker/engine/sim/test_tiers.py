"""The simulated engine's caches beside its GPU, step by step in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.sim.scheduler import Scheduler, SchedulerConfig, SimSequence
from dynamo.worker.engine.sim.tiers import BlockCache, TierConfig
from dynamo.worker.engine.sim.timing import TimingModel

SIZE = 4
TIMING = TimingModel(base_ms=1.0, ms_per_prefill_token=1.0, ms_per_decoding=0.0)
A, B, C = (tuple(range(first, first + 17)) for first in (0, 100, 200))
"""Prompts of four full blocks and a token."""


def make_scheduler(store: BlockCache | None = None, *, blocks: int = 6, timing: TimingModel = TIMING, **tiers: Any) -> Scheduler:
    """Return a scheduler whose GPU holds one of the prompts and no second one."""
    return Scheduler(
        SchedulerConfig(
            block_size=SIZE, total_blocks=blocks, watermark=0.0, timing=timing, tiers=TierConfig(token_bytes=10, **tiers)
        ),
        store,
    )


class Course:
    """Runs prompts one after the other on a scheduler, and adds up what its steps say has changed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.cached: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def run(self, *prompts: tuple[int, ...]) -> list[SimSequence]:
        """Run prompts at the same time. Return their sequences."""
        packed = [pack_tokens(prompt) for prompt in prompts]
        sequences = [SimSequence(prompt=each, hashes=sequence_hashes(each, SIZE), limit=1) for each in packed]
        for sequence in sequences:
            self.scheduler.add(sequence, self.now)
        while self.scheduler.busy:
            result = self.scheduler.step(self.now)
            self.now += result.duration_s
            for tier, removed, stored in [(Tier.GPU, result.removed, result.stored), *result.tiers]:
                self.cached[tier] -= set(removed)
                self.cached[tier] |= set(stored)
        return sequences

    def ttft_s(self, prompt: tuple[int, ...]) -> float:
        begin = self.now
        (sequence,) = self.run(prompt)
        assert sequence.prefilled_at is not None
        return sequence.prefilled_at - begin


def hashes(prompt: tuple[int, ...]) -> set[int]:
    return set(sequence_hashes(pack_tokens(prompt), SIZE))


def test_blocks_that_leave_the_gpu_are_kept_in_memory_and_come_back() -> None:
    course = Course(make_scheduler(cpu_blocks=20))
    course.run(A)
    assert course.cached[Tier.CPU] == set()
    course.run(B)
    assert course.cached[Tier.CPU] and course.cached[Tier.CPU] == hashes(A) - course.cached[Tier.GPU]
    (again,) = course.run(A)
    assert again.cached_tokens == 16
    assert hashes(A) <= course.cached[Tier.GPU]
    assert course.cached[Tier.CPU] & hashes(A), "what was read stays in memory"


def test_a_full_tier_drops_what_was_used_least_recently_and_leaves_first() -> None:
    course = Course(make_scheduler(cpu_blocks=4))
    course.run(A)
    course.run(B)
    course.run(C)
    assert len(course.cached[Tier.CPU]) == 4
    assert course.cached[Tier.CPU] == course.scheduler.tiers.cached[Tier.CPU]  # type: ignore[union-attr]
    first, *_ = sequence_hashes(pack_tokens(A), SIZE)
    kept = course.cached[Tier.CPU] & hashes(A)
    assert not kept or first in kept | course.cached[Tier.GPU], "a block is kept only if the ones before it are"


def test_reading_takes_the_time_of_its_tier() -> None:
    course = Course(make_scheduler(cpu_blocks=20, cpu_tokens_per_s=100))
    computed_s = course.ttft_s(A)
    assert computed_s == pytest.approx(0.018)  # 17 tokens and the step
    course.run(B)
    evicted = len(course.cached[Tier.CPU])
    assert course.ttft_s(A) == pytest.approx(evicted * SIZE / 100 + 0.002)  # the read, and a step of one token


def test_reads_follow_one_another_and_others_run_meanwhile() -> None:
    course = Course(make_scheduler(blocks=13, cpu_blocks=20, cpu_tokens_per_s=100))
    for prompt in (A, B, C, tuple(range(300, 317))):
        course.run(prompt)
    begin = course.now
    new = tuple(range(400, 409))
    on_cpu = {prompt: len(hashes(prompt) - course.cached[Tier.GPU]) for prompt in (A, B)}
    first, second, computed = course.run(A, B, new)
    assert computed.prefilled_at is not None
    assert computed.prefilled_at - begin < 0.02
    for sequence, blocks in ((first, on_cpu[A]), (second, on_cpu[A] + on_cpu[B])):
        assert sequence.prefilled_at is not None
        assert sequence.prefilled_at - begin >= blocks * SIZE / 100


def test_a_prefix_that_is_being_read_is_waited_for_and_not_read_twice() -> None:
    course = Course(make_scheduler(blocks=8, cpu_blocks=20, cpu_tokens_per_s=100))
    course.run(A)
    course.run(B)
    course.run(C)
    before = course.scheduler.tier_totals[Tier.CPU].read_bytes
    missing = len(hashes(A) - course.cached[Tier.GPU])
    begin = course.now
    first, second = course.run(A, (*A[:16], 7))
    assert course.scheduler.tier_totals[Tier.CPU].read_bytes - before == missing * SIZE * 10
    for sequence in (first, second):
        assert sequence.cached_tokens == 16
        assert sequence.prefilled_at is not None
        assert sequence.prefilled_at - begin >= missing * SIZE / 100


def test_one_instance_reads_what_another_has_written_to_the_store() -> None:
    store = BlockCache(100)
    writer, reader = (Course(make_scheduler(store, shared_blocks=100, shared_tokens_per_s=200)) for _ in range(2))
    writer.run(A)
    assert writer.cached[Tier.SHARED] == hashes(A)
    assert reader.ttft_s(A) == pytest.approx(16 / 200 + 0.002)
    assert reader.cached[Tier.SHARED] == set(), "what is in the store already is written and announced once"
    assert reader.scheduler.tier_totals[Tier.SHARED].hits == 4
    assert reader.scheduler.tier_totals[Tier.SHARED].written_bytes == 0


def test_what_the_store_evicts_is_not_announced() -> None:
    store = BlockCache(4)
    first, second = (Course(make_scheduler(store, shared_blocks=4)) for _ in range(2))
    first.run(A)
    second.run(B)
    assert store.cached == hashes(B)
    assert first.cached[Tier.SHARED] == hashes(A)
    assert second.cached[Tier.SHARED] == hashes(B)


def test_an_instance_announces_no_more_than_the_store_holds() -> None:
    course = Course(make_scheduler(shared_blocks=4))
    for prompt in (A, B, C):
        course.run(prompt)
        assert course.cached[Tier.SHARED] == hashes(prompt)


def test_a_prompt_is_read_from_the_fastest_tier_that_has_each_block() -> None:
    store = BlockCache(100)
    course = Course(make_scheduler(store, cpu_blocks=20, cpu_tokens_per_s=1000, shared_blocks=100, shared_tokens_per_s=10))
    course.run(A)
    course.run(B)
    totals = course.scheduler.tier_totals
    before = {tier: each.hits for tier, each in totals.items()}
    on_gpu = len(hashes(A) & course.cached[Tier.GPU])
    assert course.ttft_s(A) < 0.05
    hits = {tier: each.hits - before[tier] for tier, each in course.scheduler.tier_totals.items()}
    assert hits == {Tier.GPU: on_gpu, Tier.CPU: 4 - on_gpu, Tier.SHARED: 0}


def test_hits_and_misses_of_each_tier_add_up_to_what_was_looked_for() -> None:
    course = Course(make_scheduler(cpu_blocks=8, shared_blocks=100))
    drawn = random.Random(1)
    for _ in range(50):
        course.run(drawn.choice((A, B, C)))
    totals = course.scheduler.tier_totals
    assert totals[Tier.GPU].hits + totals[Tier.GPU].misses == 50 * 4
    assert totals[Tier.CPU].hits + totals[Tier.CPU].misses == totals[Tier.GPU].misses
    assert totals[Tier.SHARED].hits + totals[Tier.SHARED].misses == totals[Tier.CPU].misses
    assert totals[Tier.CPU].read_bytes == totals[Tier.CPU].hits * SIZE * 10
    assert totals[Tier.SHARED].misses == 3 * 4, "each prompt is computed once"


def test_steps_say_everything_that_changes_in_any_tier() -> None:
    course = Course(make_scheduler(blocks=9, cpu_blocks=10))
    drawn = random.Random(2)
    for _ in range(300):
        prompts = [tuple(drawn.choice((10, 20)) for _ in range(drawn.randint(1, 30))) for _ in range(drawn.randint(1, 3))]
        course.run(*prompts)
        assert course.cached[Tier.GPU] == course.scheduler.blocks.cached
        assert course.cached[Tier.CPU] == course.scheduler.tiers.cached[Tier.CPU]  # type: ignore[union-attr]


def test_a_speedup_makes_reads_faster_and_none_take_time_at_infinite_speed() -> None:
    for speedup, expected in ((2.0, 0.5), (0.0, 0.0)):
        timing = TimingModel(base_ms=0.0, ms_per_prefill_token=0.0, ms_per_decoding=0.0, speedup=speedup)
        store = BlockCache(100)
        Course(make_scheduler(store, shared_blocks=100)).run(A)
        reader = Course(make_scheduler(store, timing=timing, shared_blocks=100, shared_tokens_per_s=16))
        assert reader.ttft_s(A) == pytest.approx(expected)


def test_clearing_drops_memory_and_keeps_the_store() -> None:
    store = BlockCache(100)
    course = Course(make_scheduler(store, cpu_blocks=20, shared_blocks=100))
    course.run(A)
    course.run(B)
    course.scheduler.clear()
    assert course.scheduler.tiers.cached == {Tier.CPU: set(), Tier.SHARED: hashes(A) | hashes(B)}  # type: ignore[union-attr]
    course.cached[Tier.CPU].clear()
    course.run(C)
    assert course.cached[Tier.CPU] == set(), "what was dropped is not reported by a later step"


def test_the_disk_keeps_what_the_memory_drops() -> None:
    course = Course(make_scheduler(cpu_blocks=4, disk_blocks=20, disk_tokens_per_s=100))
    for prompt in (A, B, C):
        course.run(prompt)
    on_gpu, in_memory, on_disk = (hashes(A) & course.cached[tier] for tier in (Tier.GPU, Tier.CPU, Tier.DISK))
    assert on_gpu | in_memory | on_disk == hashes(A)
    slow = len(on_disk - on_gpu - in_memory)
    assert slow
    assert course.ttft_s(A) == pytest.approx(slow * SIZE / 100 + 0.002, rel=0.01), "memory is read meanwhile"
    assert course.scheduler.tier_totals[Tier.DISK].hits == slow


def test_a_disk_without_host_memory_keeps_what_the_gpu_evicts() -> None:
    course = Course(make_scheduler(disk_blocks=20))
    course.run(A)
    course.run(B)
    (again,) = course.run(A)
    assert again.cached_tokens == 16
    assert course.cached[Tier.DISK] == course.scheduler.tiers.cached[Tier.DISK]  # type: ignore[union-attr]


def test_where_a_read_fails_the_rest_is_computed_and_the_failure_counted() -> None:
    course = Course(make_scheduler(disk_blocks=20, failing_reads=1.0))
    computed_s = course.ttft_s(A)
    course.run(B)
    on_gpu = len(hashes(A) & course.cached[Tier.GPU])
    assert course.ttft_s(A) == pytest.approx(computed_s - on_gpu * SIZE * 0.001)
    disk = course.scheduler.tier_totals[Tier.DISK]
    assert (disk.failed_reads, disk.hits, disk.read_bytes) == (1, 0, 0)
    assert disk.misses == course.scheduler.tier_totals[Tier.GPU].misses


def test_about_the_set_share_of_reads_fails() -> None:
    course = Course(make_scheduler(cpu_blocks=20, failing_reads=0.25))
    for _ in range(200):
        course.run(A)
        course.run(B)
    assert 70 < course.scheduler.tier_totals[Tier.CPU].failed_reads < 130


@pytest.mark.parametrize(
    "settings", [{"cpu_blocks": -1}, {"disk_tokens_per_s": -1.0}, {"failing_reads": 1.5}, {"failing_reads": float("nan")}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        TierConfig(**settings)
