"""What a long prompt costs where nothing else is done: its steps, the tokenizer and the simulated engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from benchmarks.measuring import median, percentile
from dynamo.common.generation import GenerateRequest, Sampling, Stop, pack_tokens, request_encoder
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.api.http.json_scan import check_json
from dynamo.frontend.api.openai.requests import CompletionRequest
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.frontend.router.cache.index import PrefixIndex
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config

BLOCK_SIZE = 16
_TIMES = 3
_MAX_DEPTH, _MAX_VALUES = 64, 10**6


@dataclass(slots=True)
class PromptTimes:
    """What was done with each prompt took, in a process that does nothing else: medians of some times."""

    wall_s: list[float]
    cpu_s: list[float]

    def __str__(self) -> str:
        p50, p95 = (percentile(self.wall_s, share) * 1e3 for share in (0.5, 0.95))
        return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, {median(self.cpu_s) * 1e3:.1f} ms of CPU"

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[tuple[float, float]]]) -> PromptTimes:
        """Take the wall-clock and CPU seconds of all prompts in each round."""
        prompts = list(zip(*rounds, strict=True))
        return cls(*([median([times[kind] for times in each]) for each in prompts] for kind in (0, 1)))


def time_tokenizer(tokenizer: Tokenizer, prompts: Sequence[str]) -> PromptTimes:
    """Tokenize all prompts some times, one after the other: no prompt is in the processor's caches."""
    rounds = []
    for _ in range(_TIMES):
        times = []
        for prompt in prompts:
            wall, cpu = time.perf_counter(), time.process_time()
            tokenizer.encode_array(prompt, special_tokens=False)
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
        rounds.append(times)
    return PromptTimes.of_rounds(rounds)


async def time_engine(settings: str, tokenizer: Tokenizer, prompts: Sequence[str], output_tokens: int) -> PromptTimes:
    """Time the first token of each prompt in the simulated engine of `settings`, some times. No two requests share a prefix.

    Its cache is full from the first round on, so that what is stored evicts as much.
    """
    engine = SimEngine(sim_config(settings, "sim", None, None))
    await engine.start()
    engine.on_step(partial(_take_updates, engine.kv))
    tokens = [tokenizer.encode_array(prompt, special_tokens=False) for prompt in prompts]
    stop = Stop(max_tokens=output_tokens, ignore_eos=True)
    rounds = []
    for number in range(_TIMES + 1):
        times: list[tuple[float, float]] = []
        for ids in tokens:
            prompt = pack_tokens([len(times) + number * len(tokens), *ids])
            request = GenerateRequest(model="sim", prompt=prompt, sampling=Sampling(), stop=stop)
            wall, cpu, first = time.perf_counter(), time.process_time(), None
            async for _ in engine.generate(request, Context("r")):
                first = first or (time.perf_counter() - wall, time.process_time() - cpu)
            assert first is not None
            times.append(first)
        rounds.append(times)
    await engine.close()
    return PromptTimes.of_rounds(rounds[1:])


def _take_updates(kv: KvState) -> None:
    while kv.take_update() is not None:
        pass


def step_costs(tokenizer: Tokenizer, prompt: str) -> list[tuple[str, float]]:
    """Return the steps of a frontend, each with its CPU seconds for a prompt."""
    body = msgspec.json.encode({"model": "sim", "prompt": prompt, "max_tokens": 1})
    tokens = tokenizer.encode_array(prompt, special_tokens=False)
    packed = pack_tokens(tokens)
    request = GenerateRequest(model="sim", prompt=packed, sampling=Sampling(), stop=Stop())
    hashes = sequence_hashes(packed, BLOCK_SIZE)
    decoder = msgspec.json.Decoder(CompletionRequest)
    index, numbers = PrefixIndex(), iter(range(1, 1 << 30))
    return [
        ("bound the JSON body", _cpu_s(lambda: check_json(body, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES))),
        ("decode it", _cpu_s(lambda: decoder.decode(body))),
        ("tokenize", _cpu_s(lambda: tokenizer.encode_array(prompt, special_tokens=False))),
        ("pack the ids", _cpu_s(lambda: pack_tokens(tokens))),
        ("encode the request", _cpu_s(lambda: request_encoder.encode(request))),
        ("hash its blocks", _cpu_s(lambda: sequence_hashes(packed, BLOCK_SIZE))),
        ("look them up", _cpu_s(lambda: index.match(hashes))),
        ("add them when the engine has them", _cpu_s(lambda: index.store(InstanceId(next(numbers)), hashes))),
    ]


def _cpu_s(step: Callable[[], object]) -> float:
    """Return the least of some times."""
    least = float("inf")
    for _ in range(2 * _TIMES):
        begun = time.thread_time()
        step()
        least = min(least, time.thread_time() - begun)
    return least
