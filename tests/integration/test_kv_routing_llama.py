"""KV-aware routing between two workers that run the small language model, by what llama.cpp keeps of earlier prompts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from dynamo.frontend.config import KvCost
from dynamo.worker.engine.llama.engine import LlamaEngine
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import KV, SimFleet, prompt
from tests.support.waiting import until

pytestmark = pytest.mark.real_model


def engine() -> LlamaEngine:
    return LlamaEngine("smollm2", slots=2, context_length=512, threads=1)


@pytest.mark.slow  # two real language models
async def test_a_prompt_goes_to_the_worker_whose_slot_has_its_prefix(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace, model="smollm2", make=engine, routing=KV)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(fleet.worker())
        # By weights: so short a prompt costs next to nothing in seconds.
        await stack.enter_async_context(fleet.frontend(kv=replace(KV.kv, cost=KvCost.WEIGHTS)))
        first = [await fleet.generate(prompt(number)) for number in range(4)]
        assert all(overlap == 0 and summary.cached_tokens < 16 for _, overlap, summary in first)
        await until(fleet.is_exact)
        for number, (instance, _, before) in enumerate(first):
            again, overlap, summary = await fleet.generate(prompt(number) + "and something else")
            assert again == instance
            assert overlap >= before.prompt_tokens // 16 - 1
            assert summary.cached_tokens >= 16 * overlap
