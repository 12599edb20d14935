"""`benchmarks.tiers`: what it gains that the router counts caches beyond the GPU."""

from __future__ import annotations

from benchmarks.tiers import POLICIES, Case, make_config, read_rows, replayed, shown

REQUESTS = 300


def test_the_fleet_is_as_large_as_the_trace_demands() -> None:
    rows = read_rows("", REQUESTS)
    blocks = len({block for row in rows for block in row.hash_ids})
    cpu, shared = (make_config(rows, Case("", tier, 1.0, "learned")) for tier in ("cpu", "shared"))
    assert cpu.blocks == shared.blocks >= max(len(row.hash_ids) for row in rows)
    assert (cpu.cpu_blocks, cpu.shared_blocks) == (blocks // 8, 0)
    assert (shared.cpu_blocks, shared.shared_blocks) == (0, blocks)


def test_a_router_that_counts_the_hosts_memory_finds_more_there() -> None:
    results = {case: replayed(case, REQUESTS) for case in (Case("", "cpu", 4.0, policy) for policy in POLICIES)}
    ignored, _, learned = results.values()
    assert learned.block_hit_rate > ignored.block_hit_rate
    assert learned.ttft_p50_ms < ignored.ttft_p50_ms
    at_rate, best = shown(results, "", "cpu", [4.0], 0)
    assert at_rate[:3] == ("made up", "cpu", "4")
    assert at_rate[-3:] == best[-3:]
    assert best[2] == "best"
