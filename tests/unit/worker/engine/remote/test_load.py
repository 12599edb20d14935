"""The load of engine servers, from pages of metrics as vLLM 0.32, SGLang and llama.cpp's server have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import GenerateRequest, Stop, pack_tokens
from dynamo.common.http.client import HttpClient
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.open_requests import OpenRequests
from dynamo.worker.engine.remote.dialect import RemoteKind
from dynamo.worker.engine.remote.load import LoadFollower, ServerLoad, read_load
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.samples import read_samples
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_remote, sim_config
from tests.support.vllm_server import serve_vllm
from tests.support.waiting import WAIT_S, until

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="512",num_gpu_blocks_override="None"} 1.0
"""
VLLM_RANK = """\
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="512",num_gpu_blocks_override="None"} 1.0
"""
SGLANG = """\
sglang:token_usage{model_name="m"} 0.5
sglang:num_running_reqs{model_name="m"} 8
sglang:num_queue_reqs{model_name="m"} 1
"""
SGLANG_GAUGES = 'sglang:page_size{tp_rank="0"} 16.0\nsglang:num_pages{tp_rank="0"} 4096.0\n'
SGLANG_LABELS = 'sglang:cache_config_info{page_size="16",num_pages="4096"} 1.0\n'
LLAMA = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\nllamacpp:prompt_seconds_total 1.5e-03\n"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, ServerLoad(5, 4, 0.25, 32, 512)),
        (VLLM + VLLM_RANK, ServerLoad(5, 4, 0.5, 32, 512)),
        (SGLANG, ServerLoad(8, 1, 0.5)),
        (SGLANG + SGLANG_GAUGES, ServerLoad(8, 1, 0.5, 16, 4096)),
        (SGLANG + SGLANG_LABELS, ServerLoad(8, 1, 0.5, 16, 4096)),
        (LLAMA, ServerLoad(2, 1)),
        ("dynamo_frontend_inflight_requests 3\n", None),
        ("", None),
        ("vllm:num_requests_running{} NaN\nvllm:num_requests_running{} 1e999\nvllm:num_requests_running{} -\n", None),
    ],
)
def test_a_page_of_metrics_says_the_load(page: str, expected: ServerLoad | None) -> None:
    assert read_load(read_samples(page)) == expected


def test_a_rank_has_a_load_of_its_own_and_its_share_of_the_blocks() -> None:
    page = VLLM + VLLM_RANK
    assert read_load(read_samples(page, "0"), 2) == ServerLoad(3, 4, 0.25, 32, 256)
    assert read_load(read_samples(page, "1"), 2) == ServerLoad(2, 0, 0.5, 32, 256)
    assert read_load(read_samples(page, "2"), 3) is None


@pytest.mark.parametrize(
    "line",
    [
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1',
        f'vllm:cache_config_info{{block_size="{"9" * 3000}"}} 1',
        f"vllm:cache_config_info{{{'a' * 200_000}}} 1",
        "vllm:num_requests_waiting 999999999999999999e99",
        "sglang:num_pages 9e99",
        "vllm:kv_cache_usage_perc 9e99",
    ],
)
def test_absurd_metrics_of_a_server_are_left_out_or_cut(line: str) -> None:
    load = read_load(read_samples(f"vllm:num_requests_running 2\n{line}\n"))
    assert load is not None
    assert load.running == 2
    assert max(load.waiting, load.block_size, load.total_blocks, round(load.cache_usage * load.total_blocks)) <= 1 << 40


async def test_each_rank_of_a_server_is_an_instance(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        server.metrics = VLLM + VLLM_RANK
        flags = ["--url", "http://elsewhere", "--url", server.url, "--remote-data-parallel-size", "2"]
        options = load(WorkerConfig, flags, {}, program="worker").remote
        assert options.instances == 4
        engine = make_remote(server.url, options, position=3)
        card = await engine.start()
        request = GenerateRequest(model="m", prompt=pack_tokens((1, 2)), stop=Stop(max_tokens=2))
        async for _ in engine.generate(request, Context("r")):
            pass
        load_of_rank = engine.load()
        await engine.close()
    assert card.llm is not None
    assert (card.llm.total_blocks, load_of_rank.active_blocks, load_of_rank.running) == (256, 128, 2)
    assert all(b"x-data-parallel-rank: 1\r\n" in head for head in server.headers)
    assert len(server.headers) == 2


async def test_ranks_are_those_of_vllm(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        with pytest.raises(InvalidRequest, match="servers of vLLM"):
            await make_remote(server.url, RemoteOptions(data_parallel_size=2, kind=RemoteKind.TEXT)).start()
    flags = ["--url", "http://a", "--remote-data-parallel-size", "2", "--remote-kv-events", "ipc:///tmp/a"]
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        load(WorkerConfig, flags, {}, program="worker")


async def test_requests_of_others_count_and_those_from_here_count_at_once(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        server.metrics = VLLM
        requests = OpenRequests()
        follower = LoadFollower(HttpClient(server.url, timeout_s=WAIT_S), requests, None)
        request = GenerateRequest(model="m", prompt=pack_tokens((1, 2)))
        with requests.opened(request):
            await follower.fetch()  # 9, one of which is from here
            seen = follower.load()
            assert (seen.running, seen.waiting, seen.active_blocks, seen.total_blocks) == (5, 4, 128, 512)
            with requests.opened(request):
                assert follower.load().running == 6
        assert follower.load().running == 4
        server.metrics = ""
        assert await follower.fetch() is None


async def test_a_long_page_is_read_and_a_very_long_one_is_an_error(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        follower = LoadFollower(HttpClient(server.url, timeout_s=WAIT_S), OpenRequests(), None)
        server.metrics = "vllm:other 1\n" * 10_000 + VLLM
        assert await follower.fetch() == ServerLoad(5, 4, 0.25, 32, 512)
        server.metrics = "#" * 5_000_000
        with pytest.raises(EngineError, match="more than 4194304 bytes"):
            await follower.fetch()


async def test_a_server_with_metrics_is_looked_at_again_and_again(tmp_path: Path) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        server.metrics = VLLM
        engine = make_remote(server.url, RemoteOptions())
        card = await engine.start()
        assert card.llm is not None and (card.llm.block_size, card.llm.total_blocks) == (0, 512)
        changes: list[None] = []
        engine.on_step(lambda: changes.append(None))
        assert engine.load().running == 5
        server.metrics = VLLM.replace("} 3.0", "} 0.0")
        await until(lambda: engine.load().running == 2 and bool(changes))
        assert engine.load().waiting == 4
        server.metrics = ""  # a page of the past would keep requests away for good
        await until(lambda: engine.load().waiting == 0)
        assert (engine.load().running, engine.load().active_blocks, engine.load().total_blocks) == (0, 0, 512)
        await engine.close()


@pytest.mark.parametrize(
    ("metrics", "kind", "message"), [(SGLANG, None, "size of its KV blocks"), (VLLM, RemoteKind.TEXT, "takes token ids")]
)
async def test_events_of_blocks_that_cannot_be_compared_are_refused(
    tmp_path: Path, metrics: str, kind: RemoteKind | None, message: str
) -> None:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        server.metrics = metrics
        options: Any = RemoteOptions(kv_events=(f"ipc://{tmp_path}/events",), kind=kind)
        with pytest.raises(InvalidRequest, match=message):
            await make_remote(server.url, options).start()


def test_each_server_has_events_of_its_own() -> None:
    for flags in (["--remote-kv-events", "a"], ["--remote-kv-events", "a", "--remote-kv-events", "b", "--remote-kv-replay", "c"]):
        with pytest.raises(ConfigError, match="--remote-kv-"):
            load(WorkerConfig, ["--url", "http://a", "--url", "http://b", *flags], {}, program="worker")
    with pytest.raises(ConfigError, match="needs --remote-kv-events"):
        load(WorkerConfig, ["--url", "http://a", "--remote-kv-replay", "c"], {}, program="worker")
