"""What each step of a long prompt costs by itself, in CPU time of the thread that does it and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.measuring import median, percentile
from dynamo.common.generation import GenerateRequest, Sampling, Stop, pack_tokens, request_encoder
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.api.http.json_scan import check_json
from dynamo.frontend.api.openai.requests import CompletionRequest
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.frontend.router.cache.index import PrefixIndex

BLOCK_SIZE = 16
_TIMES = 3
_MAX_DEPTH, _MAX_VALUES = 64, 10**6


@dataclass(slots=True)
class TokenizerTimes:
    """What the tokenizer took for each prompt, in one thread of a process that does nothing else."""

    wall_s: list[float]
    cpu_s: list[float]

    def __str__(self) -> str:
        p50, p95 = (percentile(self.wall_s, share) * 1e3 for share in (0.5, 0.95))
        return f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, {median(self.cpu_s) * 1e3:.1f} ms of CPU"


def time_tokenizer(tokenizer: Tokenizer, prompts: Sequence[str]) -> TokenizerTimes:
    """Tokenize each prompt some times and keep the median."""
    times = TokenizerTimes([], [])
    for prompt in prompts:
        walls, cpus = [], []
        for _ in range(_TIMES):
            wall, cpu = time.perf_counter(), time.process_time()
            tokenizer.encode_array(prompt, special_tokens=False)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        times.wall_s.append(median(walls))
        times.cpu_s.append(median(cpus))
    return times


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
