"""`dynamo-local replay`: a trace against a simulated fleet in virtual time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest

from benchmarks.router_oracle import excesses, short_case
from dynamo.common.errors import InvalidRequest
from dynamo.frontend.config import KvRouterOptions, QueueOptions, QueuePolicy, RouterOptions, Thresholds
from dynamo.local.replay.command import main
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Figures, summary
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import BLOCK_TOKENS, Row, Workload, expand, read_trace, synthesise
from tests.support.waiting import WAIT_S

SAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"
FLEET = ReplayConfig(workers=4, blocks=400, rate=3.0)


def run(config: ReplayConfig = FLEET, mode: ReplayMode = ReplayMode.KV, rows: list[Row] | None = None) -> Figures:
    return Replay(read_trace(SAMPLE) if rows is None else rows, mode, config).run()


def ideal_hits(rows: list[Row]) -> int:
    """Blocks that one endless cache would have had; at least the last one of a prompt is always computed."""
    seen: set[int] = set()
    hits = 0
    for row in rows:
        known = next((at for at, each in enumerate(row.hash_ids) if each not in seen), len(row.hash_ids))
        hits += min(known, len(row.hash_ids) - 1)
        seen.update(row.hash_ids)
    return hits


def test_an_unbounded_cache_reaches_the_ideal_hit_rate() -> None:
    rows = read_trace(SAMPLE)
    one = run(ReplayConfig(workers=1, blocks=100_000, rate=0.001), rows=rows)
    assert one.hit_blocks == ideal_hits(rows)
    assert one.prompt_blocks == sum(len(row.hash_ids) for row in rows)
    assert one.computed_tokens == [(one.prompt_blocks - one.hit_blocks) * BLOCK_TOKENS]


@pytest.mark.parametrize("mode", list(ReplayMode))
def test_every_request_completes_once_and_every_token_is_timed(mode: ReplayMode) -> None:
    rows = read_trace(SAMPLE, 60)
    figures = run(mode=mode, rows=rows)
    assert (len(figures.ttft_s), figures.rejected, len(figures.pick_s)) == (60, 0, 60)
    assert len(figures.itl_s) == sum(row.output_length - 1 for row in rows)
    assert min(figures.ttft_s) > 0
    assert figures.virtual_s >= rows[-1].timestamp / 1e3 / FLEET.rate


def test_one_seed_has_one_result() -> None:
    one, again, *others = run(), run(), *(run(replace(FLEET, seed=seed)) for seed in range(1, 6))
    assert (one.ttft_s, one.itl_s, one.computed_tokens) == (again.ttft_s, again.itl_s, again.computed_tokens)
    assert any(other.computed_tokens != one.computed_tokens for other in others), "ties are decided at random"


def test_kv_routing_has_more_hits_and_lower_ttft_than_round_robin() -> None:
    kv, turns = summary(run()), summary(run(mode=ReplayMode.ROUND_ROBIN))
    assert kv.block_hit_rate > 1.5 * turns.block_hit_rate
    assert kv.ttft_p50_ms < turns.ttft_p50_ms
    assert kv.goodput_rps >= turns.goodput_rps


def test_guesses_are_nearly_as_good_as_events() -> None:
    events, guesses = summary(run()), summary(run(mode=ReplayMode.KV_APPROXIMATE))
    assert 0.8 * events.block_hit_rate < guesses.block_hit_rate


@pytest.mark.slow  # 24 histories
def test_two_frontends_that_share_bookings_lose_less_than_half_of_what_two_that_share_nothing_lose() -> None:
    """To one with all of the traffic. Which of two equal instances gets a request decides much: means of eight seeds."""

    def means(config: ReplayConfig) -> tuple[float, float, float]:
        runs = [summary(run(replace(config, seed=seed))) for seed in range(8)]
        hits, ttfts, imbalances = zip(*((each.block_hit_rate, each.ttft_p50_ms, each.imbalance) for each in runs), strict=True)
        return fmean(hits), fmean(ttfts), fmean(imbalances)

    two = replace(FLEET, frontends=2)
    (hits, ttft_ms, imbalance), shared, alone = map(means, (FLEET, replace(two, router=RouterOptions(replica_sync=True)), two))
    assert hits - shared[0] < 0.5 * (hits - alone[0])
    assert shared[1] - ttft_ms < 0.5 * (alone[1] - ttft_ms)
    assert abs(shared[2] - imbalance) < 0.2
    assert alone[0] < shared[0] - 0.02
    assert alone[1] > 1.3 * shared[1]


def test_busy_thresholds_reject_and_what_is_rejected_is_not_good() -> None:
    limited = replace(FLEET, router=RouterOptions(thresholds=Thresholds(active_prefill_tokens=8000)))
    for mode in (ReplayMode.KV, ReplayMode.LEAST_LOADED, ReplayMode.ROUND_ROBIN):
        figures = run(limited, mode)
        assert 0 < figures.rejected < figures.requests
        assert len(figures.ttft_s) == figures.requests - figures.rejected
        assert figures.good.total() <= figures.requests - figures.rejected
        assert summary(figures).rejected_share == figures.rejected / figures.requests


def test_a_queue_in_the_order_of_caches_finds_more_and_serves_sooner() -> None:
    workload = Workload(groups=60, prefix_blocks=12, own_blocks=2, output_tokens=100, skew=0.0, arrivals_per_s=20.0)
    rows = workload.rows(200, 1)
    busy = RouterOptions(thresholds=Thresholds(active_prefill_tokens=16_384))

    def waited(policy: QueuePolicy, size: int = 200) -> Figures:
        config = ReplayConfig(workers=3, blocks=400, router=busy, queue=QueueOptions(size=size, policy=policy))
        return run(config, rows=rows)

    by_arrival, by_prefix = waited(QueuePolicy.FCFS), waited(QueuePolicy.PREFIX)
    assert len(by_arrival.ttft_s) == len(by_prefix.ttft_s) == 200
    assert by_prefix.hit_blocks > 1.5 * by_arrival.hit_blocks
    assert max(by_prefix.ttft_s) < max(by_arrival.ttft_s), "no request waits longer for it"
    assert waited(QueuePolicy.PREFIX, size=20).rejected > 0


def test_a_prompt_longer_than_a_whole_cache_is_rejected_and_its_booking_released() -> None:
    rows = [Row(0, 1, list(range(50))), Row(1, 1, [1])]
    replay = Replay(rows, ReplayMode.KV, ReplayConfig(workers=1, blocks=50))
    assert replay.run().rejected == 1
    assert len(replay.load_tables[0]) == 0


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    one, two = expand([7, 8]), expand([8])
    assert one[BLOCK_TOKENS * 4 :] == two
    assert one[: BLOCK_TOKENS * 4] != two


def test_made_up_traces_share_prefixes_and_come_in_order() -> None:
    rows = synthesise(200, 3)
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert 0.3 < ideal_hits(rows) / sum(len(row.hash_ids) for row in rows) < 0.95


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"timestamp": 1, "output_length": 1, "hash_ids": [1]}\n\n{"timestamp": 2}', "line 3: Object missing required field"),
        ('{"timestamp": 1, "output_length": 1, "hash_ids": []}', "line 1: Expected `array` of length >= 1"),
        ('{"timestamp": -1, "output_length": 1, "hash_ids": [1]}', "line 1: Expected `float` >= 0"),
        ("{", "line 1: Input data was truncated"),
        ("\n", "has no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        read_trace(path)
    assert sentence in str(refused.value)


def test_requests_out_of_order_are_put_in_order_before_the_first_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"timestamp": {at}, "output_length": 1, "hash_ids": [1]}}\n' for at in (30, 10, 20)))
    assert [row.timestamp for row in read_trace(path, 2)] == [10, 20]


def test_the_command_prints_a_row_per_mode_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "replay.png"
    command = [
        sys.executable,
        "-m",
        "dynamo.local",
        "replay",
        str(SAMPLE),
        "--requests=30",
        "--modes=kv,random",
        f"--plot={picture}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["mode", "---", "kv", "random"]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_the_command_speaks_json_and_takes_the_options_of_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(*flags: str) -> dict[str, float]:
        with pytest.raises(SystemExit) as ended:
            main([str(SAMPLE), "--modes=kv", "--json", *flags])
        assert ended.value.code == 0
        summaries: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
        return summaries["kv"]

    assert figures("--overlap-score-weight=0")["block_hit_rate"] < figures()["block_hit_rate"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["nowhere.jsonl"], "dynamo-local replay: trace nowhere.jsonl cannot be read: No such file or directory"),
        (["--modes=fastest"], "fastest"),
        (["--requests=3", "--plot=picture.wrong"], "wrong"),
        (["--requests=3", "--timing=nowhere.csv"], "timing table nowhere.csv cannot be read"),
        (["--blokcs=3"], "--blocks"),
        (["--rates=4,0"], "--rates: 0 is below 0.001"),
        (["--groups=5", "--skew=1e9"], "--skew: 1e9 is above 10"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr and "Traceback" not in stderr


GOALS = KvRouterOptions(ttft_goal_s=2.0, itl_goal_s=0.03)


def past_saturation(
    arrivals: float, frontends: int = 1, important: float = 0.0, *, sync: bool = True, queue: int = 0
) -> dict[int, float]:
    """Return the goodput of two workers by priority; `important` is the share of requests that have priority 1."""
    workload = Workload(groups=40, prefix_blocks=12, own_blocks=2, output_tokens=150, skew=0.0, arrivals_per_s=arrivals)
    rng = random.Random(1)
    rows = [msgspec.structs.replace(row, priority=int(rng.random() < important)) for row in workload.rows(400, 1)]
    router = RouterOptions(kv=GOALS, replica_sync=sync)
    config = ReplayConfig(workers=2, blocks=600, frontends=frontends, router=router, queue=QueueOptions(size=queue))
    figures = run(config, rows=rows)
    return {priority: count / figures.virtual_s for priority, count in figures.good.items()}


def test_goodput_does_not_fall_when_more_arrives_than_can_be_served_in_time() -> None:
    assert past_saturation(16.0)[0] > 0.9 * past_saturation(8.0)[0]


def test_a_queue_does_not_lower_goodput_that_counts_from_arrival() -> None:
    assert past_saturation(8.0, queue=40)[0] > 0.9 * past_saturation(8.0)[0]


def test_several_frontends_do_not_admit_more_than_one_would() -> None:
    alone = past_saturation(8.0)[0]
    assert past_saturation(8.0, frontends=4)[0] > 0.9 * alone
    assert past_saturation(8.0, frontends=4, sync=False)[0] > 0.8 * alone


def test_important_requests_are_served_in_place_of_others() -> None:
    goodput = past_saturation(12.0, important=0.2)
    assert goodput[1] / 0.2 > 2.0 * goodput[0] / 0.8, "of the others, a much smaller share"
    assert sum(goodput.values()) > 0.6 * past_saturation(12.0)[0]


def test_learned_step_times_predict_the_first_token() -> None:
    workload = Workload(groups=20, prefix_blocks=8, own_blocks=1, output_tokens=200, skew=1.0, arrivals_per_s=6.0)
    figures = Replay(workload.rows(300, 2), ReplayMode.KV, ReplayConfig(workers=3, blocks=600, speedup=0.5)).run()
    assert len(figures.ttft_error_s) == 300
    assert median(figures.ttft_error_s) < 0.1 * median(figures.ttft_s)
    assert 0.8 < median(figures.ttft_ratio) < 1.25


def test_kv_is_nowhere_slower_than_the_better_of_the_modes_that_ignore_caches() -> None:
    """The mean latency of small fleets, from many caches that decide to none."""
    for groups, prefix, output, arrivals in ((1, 16, 200, 4.0), (60, 12, 150, 3.0), (6, 4, 500, 5.0), (400, 6, 100, 3.0)):
        workload = Workload(
            groups=groups, prefix_blocks=prefix, own_blocks=1, output_tokens=output, skew=0.5, arrivals_per_s=arrivals
        )
        rows = workload.rows(250, 3)
        modes = (ReplayMode.ROUND_ROBIN, ReplayMode.LEAST_LOADED, ReplayMode.KV)
        *others, kv = (summary(Replay(rows, mode, ReplayConfig(workers=3, blocks=400)).run()).e2e_mean_ms for mode in modes)
        assert kv < 1.02 * min(others), workload


def test_kv_is_near_the_best_placement_of_a_few_requests() -> None:
    rng = random.Random(0)
    cases = [excesses((short_case(rng, 6), ReplayMode.KV, 0))[0] for _ in range(6)]
    assert min(cases) > -1e-9, "nothing is better than the best"
    assert median(cases) < 0.1


def test_a_workload_may_be_made_up_by_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--requests 60 --groups 3 --prefix-blocks 4 --own-blocks 1 --output-tokens 20 --skew 1 --arrivals 5 --modes kv --json"
    with pytest.raises(SystemExit):
        main(flags.split())
    figures = json.loads(capsys.readouterr().out)["kv"]
    assert figures["offered_rps"] == pytest.approx(5.0, rel=0.4)
    assert 0.6 < figures["block_hit_rate"] < 0.8, "4 of 5 blocks, but for the first of each group"
    assert figures["tokens_per_s"] > 0.0
    assert figures["e2e_mean_ms"] > figures["ttft_p50_ms"] > figures["ttft_error_p50_ms"] > 0.0


def test_goodput_over_several_rates_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    flags = f"--requests 40 --groups 3 --arrivals 4 --rates 1,3 --modes round-robin,kv --json --plot {picture}"
    with pytest.raises(SystemExit):
        main(flags.split())
    by_rate = json.loads(capsys.readouterr().out)
    slow, fast = by_rate["1"]["kv"], by_rate["3"]["kv"]
    assert fast["requests_per_s"] == pytest.approx(3 * slow["requests_per_s"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tiers_save_prefills_and_more_so_if_routers_are_told_of_them() -> None:
    scarce = replace(FLEET, blocks=120)
    tiered = replace(scarce, cpu_blocks=1000)
    without, untold, told = (run(each).hit_blocks for each in (scarce, replace(tiered, tier_events=False), tiered))
    assert without < untold < told
    assert run(replace(scarce, disk_blocks=1000)).hit_blocks > without
    assert run(replace(scarce, shared_blocks=4000)).hit_blocks > told, "a store has what any of them has computed"


def test_flags_give_workers_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    def hit_rate(*flags: str) -> float:
        with pytest.raises(SystemExit):
            main(["--requests", "80", "--groups", "6", "--blocks", "20", "--workers", "2", "--modes", "kv", "--json", *flags])
        rate: float = json.loads(capsys.readouterr().out)["kv"]["block_hit_rate"]
        return rate

    assert hit_rate("--disk-blocks", "500", "--disk-fetch", "40000") > hit_rate()
