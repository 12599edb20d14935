"""The engine of a what-if, alone and beside the one that plays every step."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from dynamo.frontend.config import RouterMode, RouterOptions
from dynamo.frontend.router.cost.step_model import StepTimes
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import BLOCK_TOKENS, Row, Workload
from dynamo.planner.pools import Engine, Goals
from dynamo.planner.whatif.engine import Generation, WhatIfEngine
from dynamo.planner.whatif.fleet import WhatIfFleet, WhatIfRequest

TIMES = StepTimes(base=6e-3, token=0.125e-3, sequence=0.35e-3, block=0.0, output_tokens=150.0)
ENGINE = Engine(times=TIMES, observations=9, block_size=512, total_blocks=5000, max_num_seqs=256, max_batched_tokens=8192)


def run_until_idle(engine: WhatIfEngine) -> list[tuple[float, Generation]]:
    """Return each completed request and when it was."""
    done: list[tuple[float, Generation]] = []
    now = 0.0
    while (phase := engine.begin(now)) is not None:
        now = phase.ends_at
        done += [(now, each) for each in engine.finish()[1]]
    return done


def test_a_request_alone_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    engine = WhatIfEngine(ENGINE)
    request = Generation(prompt_tokens=1000, output_tokens=101)
    engine.add(request)
    (done_at, _), *others = run_until_idle(engine)
    assert others == []
    assert request.first_at == pytest.approx(6e-3 + 1000 * 0.125e-3)
    assert done_at == pytest.approx(request.first_at + 100 * (6e-3 + 0.35e-3))


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    engine = WhatIfEngine(ENGINE)
    request = Generation(prompt_tokens=10_000, output_tokens=1)
    engine.add(request)
    run_until_idle(engine)
    assert request.first_at == pytest.approx(2 * 6e-3 + 10_000 * 0.125e-3)
    assert engine.totals.steps == 2


def test_a_prefix_that_was_computed_before_is_not_again() -> None:
    engine = WhatIfEngine(ENGINE)
    for _ in range(2):
        engine.add(Generation(prompt_tokens=1100, output_tokens=1, hashes=[1, 2], tokens_per_hash=512))
        run_until_idle(engine)
    assert engine.totals.prefill_tokens == 1100 + 1100 - 1024


def test_what_was_used_longest_ago_is_evicted() -> None:
    engine = WhatIfEngine(Engine(times=TIMES, block_size=512, total_blocks=2))
    for hashes in ([1, 2], [3]):
        engine.remember(hashes, 512)
    assert engine.removed == [1]


def test_requests_that_do_not_fit_wait_for_those_that_run() -> None:
    engine = WhatIfEngine(Engine(times=TIMES, block_size=100, total_blocks=15))
    first, second = (Generation(prompt_tokens=1000, output_tokens=10) for _ in range(2))
    engine.add(first)
    engine.add(second)
    (first_done_at, _), _ = run_until_idle(engine)
    assert second.first_at > first_done_at


def test_no_more_requests_run_than_the_engine_takes() -> None:
    engine = WhatIfEngine(Engine(times=TIMES, max_num_seqs=1))
    first, second = (Generation(prompt_tokens=10, output_tokens=10) for _ in range(2))
    engine.add(first)
    engine.add(second)
    (first_done_at, _), _ = run_until_idle(engine)
    assert second.first_at > first_done_at


def test_a_request_that_comes_while_others_decode_joins_after_the_step_that_goes_on() -> None:
    engine = WhatIfEngine(ENGINE)
    engine.add(Generation(prompt_tokens=8, output_tokens=100))
    engine.begin(0.0)
    engine.finish()
    decoding = engine.begin(0.0)
    assert decoding is not None and decoding.steps == 99
    step_s = decoding.step_s
    engine.add(Generation(prompt_tokens=8, output_tokens=1))
    cut = engine.interrupt(2.5 * step_s)
    assert cut is not None
    assert cut.ends_at == pytest.approx(3 * step_s)


def flat(rate: float, requests: int, blocks: int) -> list[Row]:
    return Workload(groups=1, prefix_blocks=0, own_blocks=blocks, output_tokens=150, skew=0.0, arrivals_per_s=rate).rows(
        requests, 3
    )


def grouped(rate: float, requests: int) -> list[Row]:
    return Workload(groups=12, prefix_blocks=20, own_blocks=2, output_tokens=200, skew=0.0, arrivals_per_s=rate).rows(requests, 1)


@pytest.mark.parametrize(
    ("rows", "workers"),
    [(flat(6.0, 240, 16), 7), (flat(6.0, 240, 16), 8), (grouped(6.0, 240), 3), (grouped(12.0, 300), 3)],
    ids=["long prompts, nearly too many", "long prompts", "groups", "groups, nearly too many"],
)
def test_goodput_is_nearly_that_of_a_fleet_that_plays_every_step(rows: list[Row], workers: int) -> None:
    replay = Replay(rows, ReplayMode.KV, ReplayConfig(workers=workers))
    figures = replay.run()
    arrivals = [
        WhatIfRequest(
            at=row.timestamp / 1e3,
            prompt_tokens=len(row.hash_ids) * BLOCK_TOKENS,
            output_tokens=row.output_length,
            max_output=row.output_length,
            tokens_per_hash=BLOCK_TOKENS,
            hashes=[hash(tuple(row.hash_ids[: end + 1])) % 2**64 for end in range(len(row.hash_ids))],
        )
        for row in rows
    ]
    fleet = WhatIfFleet(workers, ENGINE, RouterOptions(mode=RouterMode.KV))
    tried = fleet.run(arrivals, Goals(ttft_s=10.0, itl_s=0.1), 0.0)
    assert tried.share == pytest.approx(figures.good.total() / figures.requests, abs=0.06)


def test_requests_that_only_fill_the_caches_leave_there_what_those_that_are_played_do() -> None:
    """All prompts have their first block in common: without load, each would go where that is."""
    rng = random.Random(2)
    lengths = [3] * 40
    arrivals = []
    for number in range(1200):
        session = rng.randrange(len(lengths))
        lengths[session] = lengths[session] + 1 if lengths[session] < 30 else 3
        hashes = [1, *(1000 * (session + 1) + block for block in range(lengths[session]))]
        tokens = BLOCK_TOKENS * len(hashes) + 100
        arrivals.append(
            WhatIfRequest(at=number / 5.0, prompt_tokens=tokens, output_tokens=100, tokens_per_hash=BLOCK_TOKENS, hashes=hashes)
        )
    engine, goals = replace(ENGINE, total_blocks=400), Goals(ttft_s=0.5)
    filled, played = (
        WhatIfFleet(4, engine, RouterOptions(mode=RouterMode.KV)).run(arrivals, goals, 125.0, play_from).share
        for play_from in (120.0, 0.0)
    )
    assert filled == pytest.approx(played, abs=0.04)
