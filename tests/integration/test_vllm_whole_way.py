"""`dynamo-worker` with vLLM, from the command line to the answer: a model of two layers, on the CPU. See `make test-vllm`."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from dynamo.common.generation import Sampling, Stop, Summary
from dynamo.common.names import InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, KvRouterOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from tests.support.processes import Process, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import prompt
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import until

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm: make test-vllm"),
    pytest.mark.timeout(400),
]

CPU = "--enforce-eager --dtype float32 --block-size 32 --kv-cache-memory-bytes 64M"


async def test_two_workers_answer_and_a_prompt_goes_where_its_prefix_lies(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    flags = ("--engine", "vllm", "--model", str(model), "--engine-args", CPU)
    config = FrontendConfig(
        namespace=namespace,
        router=RouterOptions(mode=RouterMode.KV, kv=KvRouterOptions(speculative_ttl_s=0)),
        http=HttpOptions(port=0),
        settle_s=0,
        log=LogOptions(),
        etcd=EtcdOptions(endpoints=(etcd_server.endpoint,)),
        nats=NatsOptions(servers=(nats_server.url,)),
    )
    async with (
        worker(etcd_server, nats_server, namespace, *flags) as first,
        worker(etcd_server, nats_server, namespace, *flags) as second,
        serve_frontend(config) as frontend,
    ):
        await until(lambda: len(frontend.plane.models.instances("tiny")) == 2, 300)

        async def generate(text: str, name: str) -> tuple[InstanceId, int, Summary]:
            stop, sampling = Stop(max_tokens=8, ignore_eos=True), Sampling(temperature=0.0)
            request = TextRequest(model="tiny", prompt=text, stop=stop, sampling=sampling)
            async with frontend.plane.generate(request, Call(account=ANONYMOUS, request_id=name)) as generation:
                while await generation.read():
                    pass
                assert generation.decision is not None
                return generation.decision.instance.id, generation.decision.overlap_blocks, generation.summary

        served = [await generate(prompt(number), f"first {number}") for number in range(6)]
        assert all(overlap == 0 for _, overlap, _ in served)
        assert len({instance for instance, _, _ in served}) == 2
        for number, (instance, _, before) in enumerate(served):
            again, overlap, summary = await generate(prompt(number), f"second {number}")
            assert again == instance
            assert summary.cached_tokens == 32 * overlap == before.prompt_tokens // 32 * 32
        kill_engine_process(first)
        assert await first.ended(120) == 1
        assert any("died" in line for line in first.lines)
        await until(lambda: len(frontend.plane.models.instances("tiny")) == 1)
        assert (await generate("more", "third"))[2].output_tokens == 8
        second.terminate()
        assert await second.ended(60) == 0


def kill_engine_process(process: Process) -> None:
    """The child in which vLLM's engine runs, as it calls itself."""
    threads = Path(f"/proc/{process.process.pid}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    [number] = [child for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(number), signal.SIGKILL)
