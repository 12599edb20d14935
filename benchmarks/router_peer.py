"""What KV-aware routing gains and costs, here and in NVIDIA Dynamo, with its own router and simulated engine, in the same run.

    python -m benchmarks.router_peer                              ours alone
    python -m benchmarks.router_peer --peer /path/to/python       and the peer installed for that interpreter

Prompts of 1024 tokens share 960 with others of their group, of which there are 24; four workers have 512 blocks of 16 tokens
each, so that caches hold all groups once and not much more. Two parts:

    gain    engines that take time, 16 clients: how much of the prompts was cached, and what that does to TTFT and latency
    cost    engines that take no time, one client and 16: what a decision adds to TTFT and to the frontend's CPU

The simulated engines of both take the same times: 6 ms a step, 0.03 ms for each prompt token and 4 ms for each sequence that
decodes.

Each round runs every system in turn, so that a machine whose speed drifts treats all alike; the tables give medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.deployment import System, make_model, ours, peer, words_of
from benchmarks.http_client import HttpConnection, connect
from benchmarks.measuring import Meter, median, percentile, table

PROMPT_TOKENS = 1024
SHARED_TOKENS = 960
GROUPS = 24
WORKERS = 4
BLOCKS = 512
BLOCK_SIZE = 16
MODES = ("round-robin", "kv")
STEP_MS = 6.0
PREFILL_TOKEN_MS = 0.03
SEQUENCE_MS = 4.0

_PROMPT = re.compile(rb'"prompt_tokens":(\d+)')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    concurrency: int
    output_tokens: int
    timed: bool
    """Whether engines take time."""


GAIN = Part("gain", 16, 32, timed=True)
COSTS = (Part("cost c=1", 1, 8, timed=False), Part("cost c=16", 16, 8, timed=False))


@dataclass(slots=True)
class Run:
    """One part on one system, once."""

    done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    frontend_cpu_s: float = 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else float("nan")

    @property
    def first_ms(self) -> float:
        return percentile(self.first_s, 0.5) * 1e3

    @property
    def frontend_cpu_ms(self) -> float:
        """Per request."""
        return self.frontend_cpu_s * 1e3 / max(1, self.done)


def prompts(tokenizer: Path, seed: int = 0) -> Iterator[str]:
    """Prompts, forever: a head that is common to a group, and a tail that no other has."""
    words = words_of(tokenizer)
    rng = random.Random(seed)
    heads = ["".join(f" {word}" for word in rng.choices(words, k=SHARED_TOKENS)) for _ in range(GROUPS)]
    while True:
        yield rng.choice(heads) + "".join(f" {word}" for word in rng.choices(words, k=PROMPT_TOKENS - SHARED_TOKENS))


def request(model: str, prompt: str, output_tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def run(part: Part, system: System, model: str, texts: Iterator[str], seconds: float) -> Run:
    """One part on one system, in a closed loop."""
    loop = asyncio.get_running_loop()
    result = Run()
    connections = [await connect(system.http_port, part.output_tokens, acknowledge_at_once=True) for _ in range(part.concurrency)]

    async def client(connection: HttpConnection, until: float, into: Run) -> None:
        while loop.time() < until and not connection.broken:
            response = connection.send(request(model, next(texts), part.output_tokens))
            await response.done
            if response.error:
                into.errors[response.error] = into.errors.get(response.error, 0) + 1
                continue
            into.done += 1
            into.first_s.append(response.first_at - response.sent_at)
            into.latencies_s.append(response.ended_at - response.sent_at)
            into.prompt_tokens += _number(_PROMPT, response.tail)
            into.cached_tokens += _number(_CACHED, response.tail)

    async def load(duration_s: float, into: Run) -> None:
        until = loop.time() + duration_s
        await asyncio.gather(*(client(connection, until, into) for connection in connections))

    await load(seconds / 3, Run())
    with Meter({"frontend": system.pids["frontend"]}) as meter:
        await load(seconds, result)
    result.wall_s, result.frontend_cpu_s = meter.wall_s, meter.cpu_s["frontend"]
    for connection in connections:
        connection.close()
    return result


def _number(pattern: re.Pattern[bytes], text: bytes) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0


def write_timing(folder: Path) -> None:
    """Write durations of steps: `timing.csv` for our simulated engine (`engine/sim/timing.py`), `timing.npz` for the peer's.

    The peer's computes prompts and decodes one after the other in a step, and looks up how long each takes. What a step takes
    whatever it does is counted with the decoding, because almost every step decodes.
    """
    with (folder / "timing.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("prefill_tokens", "decoding", "step_ms"))
        for prefill_tokens in (0, PROMPT_TOKENS):
            for decoding in (1, 4):
                rows.writerow((prefill_tokens, decoding, _step_ms(prefill_tokens, decoding)))
    prompts_of = np.linspace(0, 16 * PROMPT_TOKENS, 257)
    lengths = np.linspace(BLOCK_SIZE, 2 * PROMPT_TOKENS, 2 * PROMPT_TOKENS // BLOCK_SIZE)
    held = np.linspace(0, 2 * BLOCKS * BLOCK_SIZE, 257)
    np.savez(
        folder / "timing.npz",
        prefill_isl=prompts_of,
        prefill_ttft_ms=prompts_of * PREFILL_TOKEN_MS,
        decode_active_kv_tokens=held,
        decode_context_length=lengths,
        decode_itl=STEP_MS + SEQUENCE_MS * held[:, None] / lengths,
    )


def _step_ms(prefill_tokens: int, decoding: int) -> float:
    return STEP_MS + PREFILL_TOKEN_MS * prefill_tokens + SEQUENCE_MS * decoding


@asynccontextmanager
async def systems(part_is_timed: bool, folder: Path, python: str | None) -> AsyncIterator[dict[tuple[str, str], System]]:
    """All systems, by who made it and how it routes."""
    async with AsyncExitStack() as stack:
        running: dict[tuple[str, str], System] = {}
        for mode in MODES:
            timing = f"timing={folder}/timing.csv" if part_is_timed else "speedup=0"
            sim = f"sim:blocks={BLOCKS},block_size={BLOCK_SIZE},tokenizer={folder}/model/tokenizer.json,{timing}"
            own = ours(
                models=(sim,),
                workers=WORKERS,
                worker_flags=("--model-name", "m"),
                frontend_flags=("--router-mode", mode),
                wait_for=("m",),
                name=f"ours, {mode}",
            )
            running["ours", mode] = await stack.enter_async_context(own)
            if python is None:
                continue
            mocker = ("--num-workers", str(WORKERS), "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS))
            speed = ("--planner-profile-data", f"{folder}/timing.npz") if part_is_timed else ("--speedup-ratio", "1000000")
            other = peer(python, "mocker", frontend_flags=("--router-mode", mode), mocker_flags=(*mocker, *speed))
            running["peer", mode] = await stack.enter_async_context(other)
        yield running


def report(results: dict[tuple[str, str, str], list[Run]]) -> str:
    rows = []
    for (part, who, mode), runs in results.items():
        rows.append(
            [
                part,
                who,
                mode,
                f"{median([run.cached_share for run in runs]):.3f}",
                f"{median([run.first_ms for run in runs]):.2f}",
                f"{median([percentile(run.first_s, 0.99) * 1e3 for run in runs]):.2f}",
                f"{median([percentile(run.latencies_s, 0.5) * 1e3 for run in runs]):.1f}",
                f"{median([run.done / run.wall_s for run in runs]):.1f}",
                f"{median([run.frontend_cpu_ms for run in runs]):.3f}",
                f"{median([run.prompt_tokens / max(1, run.done) for run in runs]):.0f}",
                str(sum(sum(run.errors.values()) for run in runs)),
            ]
        )
    head = [
        "part",
        "system",
        "mode",
        "cached",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "p50 ms",
        "rps",
        "frontend CPU ms",
        "tokens",
        "errors",
    ]
    return table(head, rows) + "\n\n" + "\n".join(_differences(results))


def _differences(results: dict[tuple[str, str, str], list[Run]]) -> Iterator[str]:
    gains: dict[str, float] = {}
    for part, who in dict.fromkeys((part, who) for part, who, _ in results):
        blind, kv = results[part, who, "round-robin"], results[part, who, "kv"]
        before, after = median([run.first_ms for run in blind]), median([run.first_ms for run in kv])
        cpu = median([run.frontend_cpu_ms for run in kv]) / median([run.frontend_cpu_ms for run in blind]) - 1
        first = f"TTFT p50 {after - before:+.2f} ms ({after / before - 1:+.1%})"
        yield f"{part}, {who}: kv against round-robin: {first}, frontend CPU {cpu:+.1%}"
        if part == GAIN.name:
            gains[who] = 1 - after / before
    if "peer" in gains:
        yield f"gain of TTFT p50, ours to the peer's: {gains['ours'] / gains['peer']:.2f}"


async def main(arguments: argparse.Namespace) -> None:
    results: dict[tuple[str, str, str], list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        folder = Path(name)
        await make_model(sys.executable, folder)
        write_timing(folder)
        texts = prompts(folder / "model" / "tokenizer.json")
        for group in ((GAIN,), COSTS):
            parts = tuple(part for part in group if arguments.part in part.name)
            if not parts:
                continue
            async with systems(parts[0].timed, folder, arguments.peer) as running:
                await asyncio.sleep(2)  # the peer lists a model before all of its workers are there
                for number in range(arguments.rounds):
                    for part in parts:
                        for (who, mode), system in running.items():
                            done = await run(part, system, "m", texts, arguments.seconds)
                            results.setdefault((part.name, who, mode), []).append(done)
                    print(f"{parts[0].name}: round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    print(report(results))
    for (part_name, who, mode), runs in results.items():
        for each in runs:
            if each.errors:
                print(f"{part_name}, {who}, {mode}: {each.errors}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has NVIDIA Dynamo installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="per part, system and round")
    parser.add_argument("--part", default="", help="only parts whose name contains this: gain, cost, c=1")
    uvloop.run(main(parser.parse_args()))
