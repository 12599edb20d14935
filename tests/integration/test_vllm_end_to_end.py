"""`dynamo-worker` with vLLM, from the command line to the answer: a model of two layers, on the CPU. See `make test-vllm`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.generation import Sampling, Stop, Summary
from dynamo.common.names import InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, KvCost, KvRouterOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from tests.support.plane import generate
from tests.support.processes import Process, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import prompt
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import until

pytestmark = [
    pytest.mark.real_model,
]

CPU = "--enforce-eager --dtype float32 --block-size 32 --kv-cache-memory-bytes 64M"


async def test_two_workers_answer_and_a_prompt_goes_where_its_prefix_lies(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    flags = ("--engine", "vllm", "--model", str(model), "--engine-args", CPU)
    async with (
        worker(etcd_server, nats_server, namespace, *flags) as first,
        worker(etcd_server, nats_server, namespace, *flags) as second,
        serve_frontend(routed_by_cache(etcd_server, nats_server, namespace)) as frontend,
    ):
        await until(lambda: len(frontend.plane.models.instances("tiny")) == 2, 300)

        served = [await send(frontend, prompt(number), f"first {number}") for number in range(6)]
        assert all(overlap == 0 for _, overlap, _ in served)
        assert len({instance for instance, _, _ in served}) == 2
        for number, (instance, _, before) in enumerate(served):
            again, overlap, summary = await send(frontend, prompt(number), f"second {number}")
            assert again == instance
            assert summary.cached_tokens == 32 * overlap == before.prompt_tokens // 32 * 32
        kill_engine_process(first)
        assert await first.ended(120) == 1
        assert any("died" in line for line in first.lines)
        await until(lambda: len(frontend.plane.models.instances("tiny")) == 1)
        assert (await send(frontend, "more", "third"))[2].output_tokens == 8
        second.terminate()
        assert await second.ended() == 0


async def test_a_server_that_runs_already_is_routed_to_by_its_own_events_and_serves_again_after_a_restart(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    [port] = free_ports(1)
    events = ("--remote-kv-events", f"ipc://{tmp_path}/events", "--remote-kv-replay", f"ipc://{tmp_path}/replay")
    async with (
        worker(etcd_server, nats_server, namespace, "--url", f"http://127.0.0.1:{port}", *events),
        serve_frontend(routed_by_cache(etcd_server, nats_server, namespace)) as frontend,
    ):
        async with vllm_server(model, port, tmp_path):
            await until(lambda: bool(frontend.plane.models.instances("tiny")), 300)
            _, overlap, before = await send(frontend, prompt(1), "first")
            assert overlap == 0
            _, overlap, summary = await send(frontend, prompt(1), "second")
            assert summary.cached_tokens == 32 * overlap == before.prompt_tokens // 32 * 32
        with pytest.raises(Unavailable):
            await send(frontend, prompt(1), "third")
        async with vllm_server(model, port, tmp_path), asyncio.timeout(300):
            after = await generate_when_served(frontend)
            assert (after.output_tokens, after.cached_tokens) == (8, 0)


async def generate_when_served(frontend: Frontend) -> Summary:
    """Return what the engine counted for a prompt, once there is an engine."""
    while True:
        try:
            return (await send(frontend, prompt(1), "last"))[2]
        except Unavailable:
            await asyncio.sleep(0.5)


@asynccontextmanager
async def vllm_server(model: Path, port: int, folder: Path) -> AsyncIterator[None]:
    """Run vLLM's own server, which publishes its KV events in `folder`."""
    published = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    kv_events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **published})
    where = ("--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", *where, *CPU.split()),
        *("--enable-prompt-tokens-details", "--kv-events-config", kv_events),
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def routed_by_cache(etcd: EtcdServer, nats: NatsServer, namespace: str) -> FrontendConfig:
    return FrontendConfig(
        namespace=namespace,
        # By weights: so short a prompt costs next to nothing in seconds.
        router=RouterOptions(mode=RouterMode.KV, kv=KvRouterOptions(speculative_ttl_s=0, cost=KvCost.WEIGHTS)),
        http=HttpOptions(port=0),
        log=LogOptions(),
        etcd=EtcdOptions(endpoints=(etcd.endpoint,)),
        nats=NatsOptions(servers=(nats.url,)),
    )


async def send(frontend: Frontend, text: str, name: str) -> tuple[InstanceId, int, Summary]:
    """Return the instance, the blocks of the prompt that the router found to be cached there, and what the engine counted."""
    stop, sampling = Stop(max_tokens=8, ignore_eos=True), Sampling(temperature=0.0)
    request = TextRequest(model="tiny", prompt=text, stop=stop, sampling=sampling)
    async with generate(frontend.plane, request, Call(account=ANONYMOUS, request_id=name)) as generation:
        while await generation.read():
            pass
        assert generation.decision is not None
        return generation.decision.instance.id, generation.decision.overlap_blocks, generation.summary


def kill_engine_process(process: Process) -> None:
    """The child in which vLLM's engine runs, as it calls itself."""
    threads = Path(f"/proc/{process.process.pid}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    [number] = [child for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(number), signal.SIGKILL)
