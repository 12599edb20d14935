"""The tiers of a vLLM server: its events, and pages of metrics as vLLM 0.32 with its OffloadingConnector has them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import zmq.asyncio

from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.samples import read_samples
from dynamo.worker.engine.remote.tiers import ServerTiers
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_remote, sim_config
from tests.support.vllm_publisher import SIZE, VllmPublisher, batch, block, removed, stored
from tests.support.vllm_server import serve_vllm
from tests.support.waiting import until

PAGE = """\
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1040.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 128.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 912.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 320.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="device"} 128.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="host"} 256.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="disk"} 32.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="p2p"} 32.0
vllm:kv_offload_load_bytes_total{engine="0",model_name="tiny"} 524288.0
vllm:kv_offload_store_bytes_total{engine="0",model_name="tiny"} 1.31072e+06
vllm:kv_offload_allocation_failure_total{engine="0",model_name="tiny"} 2.0
"""
TOTALS = {
    Tier.GPU: TierTotals(hits=4, misses=28),
    Tier.CPU: TierTotals(hits=8, misses=20, read_bytes=524_288, written_bytes=1_310_720, failed_writes=2),
    Tier.DISK: TierTotals(hits=1, misses=19),
    Tier.SHARED: TierTotals(hits=1, misses=18),
}


def test_tokens_of_each_source_are_blocks_of_a_tier() -> None:
    tiers = ServerTiers()
    tiers.read(read_samples(PAGE), 32)
    assert tiers.totals() == TOTALS


def test_a_page_that_is_read_again_changes_nothing_and_a_restart_of_the_server_loses_nothing() -> None:
    tiers = ServerTiers()
    for _ in range(2):
        tiers.read(read_samples(PAGE), 32)
    tiers.read(read_samples('vllm:kv_offload_load_bytes_total{engine="0",model_name="tiny"} 100.0\n'), 0)
    assert tiers.totals()[Tier.CPU].read_bytes == 524_288 + 100
    assert tiers.totals()[Tier.CPU].hits == 8


def test_of_a_server_with_data_parallel_ranks_one_rank_counts() -> None:
    tiers, page = ServerTiers(), PAGE + PAGE.replace('engine="0"', 'engine="1"')
    tiers.read(read_samples(page, "0"), 32)
    assert tiers.totals() == TOTALS
    both = ServerTiers()
    both.read(read_samples(page), 32)
    assert both.totals()[Tier.CPU].hits == 16


def test_a_server_without_such_counts_has_no_tiers() -> None:
    tiers = ServerTiers()
    tiers.read(read_samples("vllm:num_requests_running 3.0\n"), 32)
    assert tiers.totals() == {}


async def test_what_a_server_with_offload_publishes_and_counts_is_followed(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        cache = f'vllm:cache_config_info{{block_size="{SIZE}",engine="0",num_gpu_blocks="64"}} 1.0\n'
        server.metrics = f"{PAGE}vllm:num_requests_running 0.0\n{cache}"
        with zmq.asyncio.Context() as context, closing(VllmPublisher(tmp_path, context)) as publisher:
            replaying = asyncio.create_task(publisher.serve_replays())
            await publisher.publish(batch(stored(100)))  # before anything follows
            options = RemoteOptions(kv_events=(publisher.source.events,), kv_replay=(str(publisher.source.replay),))
            engine = make_remote(server.url, options)
            await engine.start()
            await publisher.followed()
            await publisher.publish(batch(stored(100) | {"medium": "CPU"}, removed(100), stored(200)))
            await publisher.publish(batch(stored(200) | {"medium": "FS", "locality": "LOCAL"}), lost=True)
            await publisher.publish(batch(stored(300) | {"medium": "CPU"}, removed(100) | {"medium": "CPU"}))
            expected = {Tier.GPU: {block(200)}, Tier.CPU: {block(300)}, Tier.DISK: {block(200)}, Tier.SHARED: set()}
            await until(lambda: {tier: set(engine.kv.held(tier)) for tier in Tier} == expected)
            assert publisher.requested == [0, 2], "what was published before, and what was lost"
            assert [*engine.tiers()] == [*Tier]
            assert engine.tiers()[Tier.CPU].read_bytes == TOTALS[Tier.CPU].read_bytes
            await engine.close()
            replaying.cancel()
