"""vLLM's offloading connector, its events and its counts, with a model of two layers: `make test-vllm`.

The GPU's part is a cache of 16 blocks on a CPU. See `tests.support.vllm_offload` for what replaces the copies of a GPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamo.common.generation import GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import Context, HasTiers
from dynamo.worker.process.engine_factory import make_engine
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

SIZE = 32
SMALL = f"--enforce-eager --dtype float32 --block-size {SIZE} --kv-cache-memory-bytes 1M"
CPU_BLOCKS = 24
BLOCK_BYTES = (1 << 20) // 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from tests.support.vllm_offload import offload_arguments

    model = make_tiny_llama(tmp_path_factory.mktemp("vllm") / "tiny")
    arguments = f"{SMALL} {offload_arguments(CPU_BLOCKS * BLOCK_BYTES)}"
    engine = make_engine(str(model), engine_args=arguments, max_num_seqs=2, context_length=448)
    await engine.start()
    yield engine
    await engine.close()


def prompt(number: int) -> list[int]:
    """Return a prompt of four full blocks and two tokens."""
    return [(number * 37 + position * 7) % 250 for position in range(4 * SIZE + 2)]


def blocks(number: int, salt: str = "") -> set[int]:
    return set(sequence_hashes(pack_tokens(prompt(number)), SIZE, space_hash("", salt)))


async def run(engine: Any, number: int, salt: str = "") -> tuple[list[int], int]:
    """Return the tokens that were generated, and how many of the prompt were cached."""
    request = GenerateRequest(
        model="tiny",
        prompt=pack_tokens(prompt(number)),
        sampling=Sampling(temperature=0.0),
        stop=Stop(max_tokens=4, ignore_eos=True),
        cache_salt=salt,
    )
    *deltas, summary = [item async for item in engine.generate(request, Context(f"{number}"))]
    assert isinstance(summary, Summary)
    return [token for delta in deltas for token in delta.tokens], summary.cached_tokens


async def test_blocks_that_the_gpu_evicts_are_published_as_the_hosts_and_come_back(engine: Any) -> None:
    first, _ = await run(engine, 1)
    for number in range(2, 6):
        await run(engine, number)
    await until(lambda: blocks(1) <= set(engine.kv.held(Tier.CPU)) and not blocks(1) & set(engine.kv.held(Tier.GPU)))
    assert await run(engine, 1) == (first, 4 * SIZE), "read from the host's memory, it gives the same tokens"
    await until(lambda: blocks(1) <= set(engine.kv.held(Tier.GPU)))
    assert isinstance(engine, HasTiers)
    cpu = engine.tiers()[Tier.CPU]
    await until(lambda: cpu.read_bytes > 0)
    assert cpu.hits == 4
    assert cpu.misses > 0
    assert cpu.written_bytes >= 5 * 4 * BLOCK_BYTES
    assert cpu.read_bytes == 4 * BLOCK_BYTES


async def test_what_the_hosts_memory_evicts_is_published_too(engine: Any) -> None:
    for number in range(20, 30):
        await run(engine, number)
    await until(lambda: blocks(29) <= set(engine.kv.held(Tier.CPU)))
    assert len(engine.kv.held(Tier.CPU)) <= CPU_BLOCKS
    assert not blocks(20) & set(engine.kv.held(Tier.CPU))


async def test_blocks_of_a_salted_prompt_are_never_those_of_an_unsalted_one(engine: Any) -> None:
    await run(engine, 50, salt="secret")
    await until(lambda: blocks(50, "secret") <= set(engine.kv.held(Tier.CPU)))
    assert not blocks(50) & set(engine.kv.held(Tier.CPU))
