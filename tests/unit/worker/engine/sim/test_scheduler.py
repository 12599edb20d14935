"""The simulated engine's memory and schedule, step by step in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason, pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.worker.engine.sim.blocks import BlockManager
from dynamo.worker.engine.sim.scheduler import Scheduler, SchedulerConfig, SimSequence, StepResult
from dynamo.worker.engine.sim.timing import TimingModel
from dynamo.worker.engine.sim.tokens import START, advance, advance_all, next_token, next_token_and_state

SIZE = 4


def config(**fields: object) -> SchedulerConfig:
    fields = {"block_size": SIZE, "total_blocks": 100, "max_batched_tokens": 64, "watermark": 0.0, **fields}
    return SchedulerConfig(**fields)  # type: ignore[arg-type]


def sequence(tokens: list[int], limit: int = 4, **fields: object) -> SimSequence:
    prompt = pack_tokens(tokens)
    return SimSequence(prompt=prompt, hashes=sequence_hashes(prompt, SIZE), limit=limit, **fields)  # type: ignore[arg-type]


def run(scheduler: Scheduler, steps: int = 10_000) -> list[StepResult]:
    results: list[StepResult] = []
    now = 0.0
    while scheduler.busy and len(results) < steps:
        results.append(scheduler.step(now))
        now += results[-1].duration_s
    return results


def tokens_of(results: list[StepResult], wanted: SimSequence) -> list[int]:
    return [token for result in results for each, token in result.emitted if each is wanted]


# Tokens


def test_a_sequences_state_does_not_depend_on_how_it_is_cut() -> None:
    tokens = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    state = START
    for token in tokens.tolist():
        state = advance(state, token)
    assert state == advance_all(START, tokens) == advance_all(advance_all(START, tokens[:777]), tokens[777:])


def test_tokens_spread_over_the_vocabulary() -> None:
    state, seen = START, [0] * 50
    for _ in range(20_000):
        token = next_token(state, 7, 50)
        state = advance(state, token)
        seen[token] += 1
    assert 300 < min(seen) <= max(seen) < 500


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 9])
def test_a_generation_continues_elsewhere_with_the_same_tokens(cut: int) -> None:
    other_scheduler = Scheduler(config())
    whole = sequence(list(range(10)), limit=12, seed=3)
    other_scheduler.add(whole, 0.0)
    expected = tokens_of(run(other_scheduler), whole)
    assert len(expected) == 12
    scheduler = Scheduler(config(total_blocks=50, max_batched_tokens=7))
    rest = sequence(list(range(10)) + expected[:cut], limit=12 - cut, seed=3)
    scheduler.add(rest, 0.0)
    assert tokens_of(run(scheduler), rest) == expected[cut:]


def test_seeds_lead_to_different_tokens() -> None:
    scheduler = Scheduler(config())
    pair = [sequence(list(range(10)), limit=10, seed=seed) for seed in (1, 2)]
    for each in pair:
        scheduler.add(each, 0.0)
    results = run(scheduler)
    assert tokens_of(results, pair[0]) != tokens_of(results, pair[1])


# Blocks


def test_blocks_are_evicted_least_recently_used_and_leaves_first() -> None:
    blocks = BlockManager(5)
    assert blocks.take([], 3)
    blocks.commit([1, 2, 3])
    blocks.give_back([1, 2, 3], 0)
    assert blocks.take([1], 1)  # the first block is used again, by a prompt that goes on differently
    blocks.commit([4])
    blocks.give_back([1, 4], 0)
    blocks.removed.clear()
    for evicted in ([], [3], [2], [4], [1]):
        assert blocks.grow(1)
        assert blocks.removed == evicted
        blocks.removed.clear()
    assert not blocks.grow(1)


def test_taking_more_than_there_is_changes_nothing() -> None:
    blocks = BlockManager(4)
    assert blocks.take([], 2)
    blocks.commit([1, 2])
    blocks.give_back([1, 2], 0)
    assert not blocks.take([1, 2], 3)
    assert not blocks.take([1, 2], 2, keep_free=1)
    assert (blocks.active, blocks.cached) == (0, {1, 2})
    assert blocks.take([1, 2], 2)
    assert blocks.active == blocks.total


def test_clearing_keeps_blocks_in_use() -> None:
    blocks = BlockManager(4)
    blocks.take([], 2)
    blocks.commit([1, 2])
    blocks.give_back([2], 0)
    blocks.clear()
    assert blocks.cached == {1}
    assert blocks.removed == [2]


# Scheduling


def test_a_long_prompt_is_computed_in_chunks_beside_running_ones() -> None:
    scheduler = Scheduler(config(max_batched_tokens=16))
    first, second = sequence([1, 2, 3], limit=50), sequence(list(range(40)))
    scheduler.add(first, 0.0)
    scheduler.step(0.0)
    scheduler.add(second, 0.0)
    assert scheduler.queued_prefill_tokens == 40
    steps = [scheduler.step(0.0) for _ in range(3)]
    assert [(step.decoding, step.prefill_tokens) for step in steps] == [(1, 15), (1, 15), (1, 10)]
    assert [[each for each, _ in step.emitted] for step in steps] == [[first], [first], [first, second]]
    assert scheduler.queued_prefill_tokens == 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = Scheduler(config())
    scheduler.add(sequence(list(range(12)), limit=1), 0.0)
    run(scheduler)
    again, longer, other = sequence(list(range(12))), sequence([*range(12), 50, 51]), sequence([99, *range(1, 12)])
    for each in (again, longer, other):
        scheduler.add(each, 0.0)
    run(scheduler)
    # The last token of a prompt is always computed, so its block is not taken from the cache.
    assert (again.cached_tokens, longer.cached_tokens, other.cached_tokens) == (8, 12, 0)


def test_output_is_cached_for_the_next_turn() -> None:
    scheduler = Scheduler(config())
    turn = sequence(list(range(6)), limit=7)
    scheduler.add(turn, 0.0)
    output = tokens_of(run(scheduler), turn)
    following = sequence([*range(6), *output, 1, 2, 3])
    scheduler.add(following, 0.0)
    run(scheduler)
    assert following.cached_tokens == 12


def test_without_prefix_caching_nothing_is_kept() -> None:
    scheduler = Scheduler(config(prefix_caching=False))
    pair = [SimSequence(prompt=pack_tokens(range(12)), hashes=[], limit=6) for _ in range(2)]
    for each in pair:
        scheduler.add(each, 0.0)
        results = run(scheduler)
        assert not any(result.stored for result in results)
    assert [each.cached_tokens for each in pair] == [0, 0]
    assert scheduler.blocks.active == 0


def test_a_preempted_sequence_starts_over_and_generates_the_same_tokens() -> None:
    alone = Scheduler(config())
    expected = []
    for number in range(3):
        each = sequence([number] * 8, limit=20)
        alone.add(each, 0.0)
        expected.append(tokens_of(run(alone), each))
    crowded = Scheduler(config(total_blocks=12))
    crowd = [sequence([number] * 8, limit=20) for number in range(3)]
    for each in crowd:
        crowded.add(each, 0.0)
    results = run(crowded)
    assert sum(result.preempted for result in results) > 0
    assert crowd[0].preempted == 0
    assert [tokens_of(results, each) for each in crowd] == expected
    assert crowded.blocks.active == 0


def test_the_watermark_leaves_room_for_running_ones() -> None:
    scheduler = Scheduler(config(total_blocks=10, watermark=0.2))
    scheduler.add(sequence([1] * 15, limit=8), 0.0)
    scheduler.add(sequence([2] * 20, limit=1), 0.0)
    scheduler.step(0.0)
    assert (len(scheduler.running), scheduler.waiting) == (1, 1)
    run(scheduler)
    whole = Scheduler(config(total_blocks=10, watermark=0.2))
    whole.add(sequence([3] * 38, limit=1), 0.0)  # alone it may use all there is
    assert run(whole)[-1].finished


def test_important_requests_go_first_and_are_preempted_last() -> None:
    scheduler = Scheduler(config(max_num_seqs=1))
    order = [sequence([number] * 4, limit=1, priority=priority) for number, priority in enumerate((0, 5, 0, 9))]
    for each in order:
        scheduler.add(each, 0.0)
    finished = [each for result in run(scheduler) for each in result.finished]
    assert [order.index(each) for each in finished] == [3, 1, 0, 2]
    crowded = Scheduler(config(total_blocks=6))
    low, high = sequence([1] * 8, limit=12), sequence([2] * 8, limit=12, priority=1)
    for each in (low, high):
        crowded.add(each, 0.0)
    run(crowded)
    assert (low.preempted > 0, high.preempted) == (True, 0)


def test_an_aborted_sequence_leaves_nothing_behind() -> None:
    scheduler = Scheduler(config(max_num_seqs=1))
    running, waiting = sequence([1] * 9, limit=50), sequence([2] * 9)
    scheduler.add(running, 0.0)
    scheduler.add(waiting, 0.0)
    scheduler.step(0.0)
    scheduler.abort(waiting)
    scheduler.abort(running)
    scheduler.abort(running)
    assert not scheduler.busy
    assert scheduler.blocks.active == 0


def test_generation_ends_at_a_stop_token() -> None:
    scheduler = Scheduler(config())
    free = sequence([1, 2, 3], limit=20)
    scheduler.add(free, 0.0)
    tokens = tokens_of(run(scheduler), free)
    stopped = sequence([1, 2, 3], limit=20, stop_tokens=frozenset({tokens[5]}))
    late = sequence([1, 2, 3], limit=20, stop_tokens=frozenset({tokens[5]}), min_tokens=6)
    for each in (stopped, late):
        scheduler.add(each, 0.0)
    results = run(scheduler)
    assert tokens_of(results, stopped) == tokens[:5]
    assert (stopped.finish_reason, stopped.stop_token) == (FinishReason.STOP, tokens[5])
    assert tokens_of(results, late)[:6] == tokens[:6]
    assert (free.finish_reason, free.stop_token) == (FinishReason.LENGTH, None)


def test_an_end_comes_after_the_mean_number_of_tokens() -> None:
    scheduler = Scheduler(config(eos_token=31_999, mean_output_tokens=20, max_num_seqs=8))
    ends = frozenset({31_999})
    many = [sequence([number], limit=1000, stop_tokens=ends) for number in range(300)]
    stubborn = sequence([1], limit=300, ignore_eos=True)
    for each in (*many, stubborn):
        scheduler.add(each, 0.0)
    run(scheduler)
    assert 15 < sum(each.generated for each in many) / len(many) < 25
    assert {each.stop_token for each in many} == {31_999}
    assert stubborn.generated == 300


@pytest.mark.parametrize("tokens", [[], [1] * 400])
def test_a_prompt_that_can_never_run_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        Scheduler(config()).add(sequence(tokens), 0.0)


def test_output_ends_where_the_cache_does() -> None:
    scheduler = Scheduler(config(total_blocks=3))
    only = sequence([1] * 9, limit=1000)
    scheduler.add(only, 0.0)
    run(scheduler)
    assert (only.generated, only.finish_reason) == (3, FinishReason.LENGTH)


def test_fetched_prompts_are_not_computed_but_take_their_time() -> None:
    timing = TimingModel(base_ms=1.0, ms_per_prefill_token=1.0, ms_per_decoding=0.0)
    scheduler = Scheduler(config(timing=timing, kv_transfer_tokens_per_s=100.0))
    fetched = sequence([1] * 40, limit=2, fetched=True)
    scheduler.add(fetched, 0.0)
    results = run(scheduler)
    assert [result.prefill_tokens for result in results if result.prefill_tokens] == [1]
    assert fetched.prefilled_at == pytest.approx(0.4 + 0.002)
    again = sequence([1] * 40, limit=1, fetched=True)
    scheduler.add(again, 0.0)
    run(scheduler)
    assert again.prefilled_at == pytest.approx(0.04 + 0.002)  # 36 of 40 tokens were here already


def test_a_request_that_comes_while_another_is_fetched_need_not_wait_for_it() -> None:
    timing = TimingModel(base_ms=1.0, ms_per_prefill_token=0.0, ms_per_decoding=0.0)
    scheduler = Scheduler(config(timing=timing, kv_transfer_tokens_per_s=100.0))
    scheduler.add(sequence([1] * 40, limit=2, fetched=True), 0.0)
    now = scheduler.step(0.0).duration_s
    other = sequence([2] * 8, limit=1)
    scheduler.add(other, now)
    run(scheduler)
    assert other.prefilled_at is not None
    assert other.prefilled_at < 0.01


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 20)),
        st.tuples(st.just("step"), st.just([0]), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.just([0]), st.integers(0, 30)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(STEPS, st.integers(9, 30), st.sampled_from([0.0, 0.1]), st.sampled_from([3, 16]))
def test_blocks_are_accounted_for_whatever_happens(
    steps: list[tuple[str, list[int], int]], total: int, watermark: float, budget: int
) -> None:
    scheduler = Scheduler(config(total_blocks=total, watermark=watermark, max_batched_tokens=budget, max_num_seqs=5))
    state, added, paths = KvState(), list[SimSequence](), dict[int, int | None]()

    def check(result: StepResult) -> None:
        assert result.prefill_tokens + result.decoding <= budget
        state.remove(result.removed)
        state.store(result.stored)
        state.take_update()
        for each in added:
            for parent, block in zip([None, *each.hashes], each.hashes, strict=False):
                paths[block] = parent
        cached = scheduler.blocks.cached
        assert set(state.snapshot().hashes) == cached
        # What is cached is cached from the first block on: leaves go first.
        assert all(paths[block] is None or paths[block] in cached for block in cached)
        blocks = scheduler.blocks
        assert 0 <= blocks.active <= total
        assert len(cached) + blocks.private <= total
        for each in scheduler.running:
            assert (each.committed + each.private) * SIZE >= each.computed
        assert blocks.private == sum(each.private for each in scheduler.running)

    for kind, tokens, number in steps:
        if kind == "add":
            each = sequence(tokens, limit=number)
            added.append(each)
            scheduler.add(each, 0.0)
        elif kind == "abort":
            if number < len(added):
                scheduler.abort(added[number])
        else:
            for _ in range(number):
                check(scheduler.step(0.0))
    for _ in range(20_000):
        if not scheduler.busy:
            break
        check(scheduler.step(0.0))
    assert not scheduler.busy
    assert scheduler.blocks.active == 0
    assert all(each.done for each in added)


def test_adapters_share_nothing() -> None:
    scheduler = Scheduler(config())
    space = space_hash("lora")
    prompt = pack_tokens(range(12))
    plain = SimSequence(prompt=prompt, hashes=sequence_hashes(prompt, SIZE), limit=8)
    adapted = SimSequence(prompt=prompt, hashes=sequence_hashes(prompt, SIZE, space), space=space, limit=8)
    for each in (plain, adapted):
        scheduler.add(each, 0.0)
        run(scheduler)
    assert adapted.cached_tokens == 0
    assert not set(plain.hashes) & set(adapted.hashes)


# Timing


def test_a_step_takes_the_time_of_the_timing_model() -> None:
    timing = TimingModel(base_ms=5.0, ms_per_prefill_token=0.1, ms_per_decoding=0.5)
    assert timing.step_s(100, 4) == pytest.approx(0.017)
    assert TimingModel(speedup=0).step_s(1000, 10) == 0.0
    assert TimingModel(speedup=10).step_s(8, 2) == pytest.approx(TimingModel().step_s(8, 2) / 10)


def test_a_timing_model_is_fitted_to_measured_steps(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    rows = [(prefill, decoding, 4 + 0.2 * prefill + 0.3 * decoding) for prefill in (0, 64, 512) for decoding in (1, 8, 64)]
    table.write_text("prefill_tokens,decoding,step_ms\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    timing = TimingModel.load(table, speedup=2.0)
    assert timing.base_ms == pytest.approx(4.0)
    assert timing.ms_per_prefill_token == pytest.approx(0.2)
    assert timing.ms_per_decoding == pytest.approx(0.3)
    assert timing.speedup == 2.0


@pytest.mark.parametrize("text", ["", "prefill_tokens,decoding\n1,2\n", "prefill_tokens,decoding,step_ms\n1,x,2\n"])
def test_a_broken_timing_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "steps.csv"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        TimingModel.load(table)
    table.write_text(text)
    with pytest.raises(InvalidRequest):
        TimingModel.load(table)


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="block_size"):
        SchedulerConfig(block_size=0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 200_000))
def test_a_token_and_the_state_after_it_are_the_same_in_one_call(state: int, seed: int, vocabulary: int) -> None:
    token = next_token(state, seed, vocabulary)
    assert next_token_and_state(state, seed, vocabulary) == (token, advance(state, token))
