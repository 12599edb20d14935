"""Prompts of 100,000 tokens beside short requests, through a frontend that routes by KV caches.

    python -m benchmarks.long_prompts                     a minute and a half
    python -m benchmarks.long_prompts --brief             some seconds, with shorter prompts: whether it runs

Real text is tokenized by the tokenizer of the small model that `make setup` installs. Engines are simulated and take no time;
prompts share nothing, so that each is computed, hashed, stored and reported as a whole. Phases alternate: short requests alone,
and the same beside long prompts. The tables say

    CPU       cores that each process uses, all of its threads and the processes that it started, and CPU time per long prompt
    added     how much longer the first token of a long prompt takes than the tokenizer and the simulated engine do, which are
              measured alone in this process before: an engine that takes no time still keeps its blocks
    short     first tokens and whole responses of short requests, and their ratio with and without long ones beside them
    turns     the longest turns of the frontend's event loop, while long prompts are sent one after the other: see `turns`

All processes, this client among them, share the machine. So the load average stands beside each phase, and with few processors
CPU times and turns say more than latencies, which are those of the engines and of the client as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.deployment import System, http_ready, ours
from benchmarks.long_prompts.load import Sender, Sent
from benchmarks.long_prompts.prompts import MODEL, requests, texts
from benchmarks.long_prompts.steps import BLOCK_SIZE, PromptTimes, step_costs, time_engine, time_tokenizer
from benchmarks.long_prompts.turns import Turn, read_turns
from benchmarks.measuring import Meter, children, median, percentile, table
from benchmarks.models import smollm2
from dynamo.common.process.interpreter import interpreter
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer

SHORT_PROMPT_TOKENS, SHORT_TOKENS = 64, 16
LONG_TOKENS = 8
_SHORT_PROMPTS = 64
_BLOCKS = 65_536
"""KV blocks of an engine: a million tokens."""
_WARM_UP_S = 3.0
_ONE_BY_ONE = 20.0
"""Long prompts a second at most, where each waits for the one before."""
_SETTLE_S = 0.2
_IDLE_S = 3.0


@dataclass(slots=True)
class Phase:
    """What was measured while one mixture of requests was sent, in all rounds."""

    name: str
    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    """Load averages of the machine at the ends."""
    short: Sent = field(default_factory=Sent)
    long: Sent = field(default_factory=Sent)

    @property
    def frontend_cpu_s(self) -> float:
        return sum(seconds for name, seconds in self.cpu_s.items() if name.startswith("frontend"))


class LongPrompts:
    """One run against one deployment."""

    def __init__(
        self, system: System, record: Path, options: argparse.Namespace, prompts: Sequence[str], short: Sequence[str]
    ) -> None:
        self._system = system
        self._record = record
        self._options = options
        self._long = Sender(system.http_port, requests(prompts, LONG_TOKENS), LONG_TOKENS)
        self._short = Sender(system.http_port, requests(short, SHORT_TOKENS), SHORT_TOKENS)
        self.idle, self.alone, self.beside = Phase("idle"), Phase("short requests alone"), Phase("beside long prompts")
        self.single = Sent()
        """Long prompts that were sent one after the other."""
        self.turns: list[Turn] = []

    async def run(self) -> None:
        options = self._options
        await asyncio.gather(self._long.send(options.rate, _WARM_UP_S), self._short.send(options.short_rate, _WARM_UP_S))
        await self._measure(self.idle, _IDLE_S)
        self.single = await self._one_by_one()
        await self._record_turns()
        for number in range(options.rounds):
            await self._measure(self.alone, options.seconds, short=True)
            await self._measure(self.beside, options.seconds, short=True, long=True)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
        self._long.close()
        self._short.close()

    async def _one_by_one(self) -> Sent:
        """Send long prompts one after the other."""
        sent = Sent()
        for _ in range(self._options.prompts):
            sent.extend(await self._long.send(_ONE_BY_ONE, 1 / _ONE_BY_ONE))
        return sent

    async def _record_turns(self) -> None:
        """Send long prompts while the frontend records its turns, which keeps its event loop awake."""
        frontend = self._system.pids["frontend"]
        os.kill(frontend, signal.SIGUSR1)
        await self._one_by_one()
        os.kill(frontend, signal.SIGUSR1)
        await asyncio.sleep(_SETTLE_S)
        self.turns = read_turns(self._record)

    async def _measure(self, phase: Phase, seconds: float, *, short: bool = False, long: bool = False) -> None:
        options = self._options
        with Meter(self._pids()) as meter:
            sent = await asyncio.gather(
                self._short.send(options.short_rate if short else 0, seconds),
                self._long.send(options.rate if long else 0, seconds),
                asyncio.sleep(seconds),
            )
        phase.wall_s += meter.wall_s
        for name, cpu_s in meter.cpu_s.items():
            phase.cpu_s[name] = phase.cpu_s.get(name, 0.0) + cpu_s
        phase.load.append(os.getloadavg()[0])
        phase.short.extend(sent[0])
        phase.long.extend(sent[1])

    def _pids(self) -> dict[str, int]:
        """Return the processes, with those that the frontend has started."""
        pids = self._system.pids
        return pids | {f"frontend, process {pid}": pid for pid in children(pids["frontend"])}


def report(run: LongPrompts, tokenizer: PromptTimes, engine: PromptTimes, options: argparse.Namespace) -> str:
    phases = (run.idle, run.alone, run.beside)
    parts = [_cpu_table(phases), _turn_table(run.turns, options.prompts), _cost(*phases, tokenizer, options.rate)]
    parts += [_added_table(run.single, run.beside.long, tokenizer, engine), _short_table(run.alone.short, run.beside.short)]
    for phase in (run.alone, run.beside):
        parts += [f"failed, {phase.name}: {sent.errors}" for sent in (phase.short, phase.long) if sent.errors]
    return "\n\n".join(parts)


def _cost(idle: Phase, alone: Phase, beside: Phase, tokenizer: PromptTimes, rate: float) -> str:
    """Say what a long prompt costs: what is left of the CPU time without short requests and what an idle frontend does."""
    count = len(beside.long.positions)
    if not count or not alone.short.positions:
        return "no request was served"
    idle_cores = idle.frontend_cpu_s / idle.wall_s
    short_s = (alone.frontend_cpu_s - idle_cores * alone.wall_s) / len(alone.short.positions)
    long_s = (beside.frontend_cpu_s - idle_cores * beside.wall_s - short_s * len(beside.short.positions)) / count
    own_s = median(tokenizer.cpu_s)
    return (
        f"A short request costs the frontend {short_s * 1e3:.2f} ms of CPU, a long one {long_s * 1e3:.1f} ms.\n"
        f"The tokenizer alone takes {own_s * 1e3:.1f} of these.\n"
        f"Long prompts at {rate:g} a second use {long_s * rate:.2f} cores; {count / beside.wall_s:.1f} a second were served."
    )


def _cpu_table(phases: Sequence[Phase]) -> str:
    rows = []
    for phase in phases:
        workers = sum(seconds for name, seconds in phase.cpu_s.items() if name.startswith("worker"))
        used = (phase.frontend_cpu_s, workers, phase.cpu_s["nats"], phase.cpu_s["client"])
        rows.append([phase.name, *(f"{seconds / phase.wall_s:.3f}" for seconds in used), _loads(phase)])
    return table(["cores used", "frontend", "workers", "nats-server", "client", "load average"], rows)


def _turn_table(turns: Sequence[Turn], prompts: int) -> str:
    """The longest turn, and what is longer than the longest turns of one prompt in ten and in two, where each has such a one."""
    rows = []
    for name, values in (
        ("CPU time", [turn.ran_ms for turn in turns]),
        ("time", [turn.wall_ms for turn in turns]),
    ):
        longest = sorted(values, reverse=True)
        places = (0, prompts // 10, prompts // 2, prompts)
        rows.append([name, *(f"{longest[place]:.2f}" if place < len(longest) else "-" for place in places)])
    return table([f"turns of {prompts} prompts, ms", "longest", "one in 10 prompts", "one in 2", "one each"], rows)


def _added_table(single: Sent, beside: Sent, tokenizer: PromptTimes, engine: PromptTimes) -> str:
    rows = [
        [name, str(len(values)), *(f"{percentile(values, share) * 1e3:.1f}" for share in (0.5, 0.95))]
        for name, values in (
            ("tokenizer alone", tokenizer.wall_s),
            ("engine alone", engine.wall_s),
            ("first token, one prompt at a time", single.first_s),
            ("added", _added_s(single, tokenizer, engine)),
            ("first token, at the rate", beside.first_s),
            ("added", _added_s(beside, tokenizer, engine)),
        )
    ]
    return table(["long prompts", "count", "p50 ms", "p95 ms"], rows)


def _added_s(sent: Sent, *alone: PromptTimes) -> list[float]:
    served = zip(sent.positions, sent.first_s, strict=True)
    return [first_s - sum(times.wall_s[position] for times in alone) for position, first_s in served]


def _short_table(alone: Sent, beside: Sent) -> str:
    rows = []
    for name, before, after in (
        ("first token", alone.first_s, beside.first_s),
        ("whole response", alone.whole_s, beside.whole_s),
    ):
        cells = [f"{percentile(values, share) * 1e3:.1f}" for share in (0.5, 0.99) for values in (before, after)]
        ratios = [percentile(after, share) / percentile(before, share) for share in (0.5, 0.99)]
        rows.append([name, *cells[:2], f"{ratios[0]:.2f}", *cells[2:], f"{ratios[1]:.2f}"])
    return table(["short requests", "p50 ms alone", "beside", "ratio", "p99 ms alone", "beside", "ratio"], rows)


def _loads(phase: Phase) -> str:
    return f"{min(phase.load):.1f}-{max(phase.load):.1f}"


async def main(options: argparse.Namespace) -> bool:
    """Return whether a request failed."""
    print(f"{interpreter()}, {os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}", flush=True)
    data = smollm2()
    tokenizer = Tokenizer(data, fast=options.fast)
    prompts = texts(tokenizer, options.tokens, options.prompts)
    times = time_tokenizer(tokenizer, prompts)
    kind = "fastokens" if tokenizer.is_fast else "tokenizers"
    print(f"{len(prompts)} prompts of {options.tokens:,} tokens; {kind} alone: {times}, load average {os.getloadavg()[0]:.1f}")
    costs = [[name, f"{seconds * 1e3:.2f}"] for name, seconds in step_costs(tokenizer, prompts[0])]
    print("\n" + table(["step of a long prompt, alone", "CPU ms"], costs) + "\n", flush=True)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-long-")))
        (folder / "tokenizer.json").write_bytes(data)
        record = folder / "turns"
        settings = f"speedup=0,block_size={BLOCK_SIZE},blocks={_BLOCKS}"
        engine_times = await time_engine(settings, tokenizer, prompts, LONG_TOKENS)
        flags = ["--router-mode", "kv", *(() if options.fast else ("--no-fast-tokenizer",))]
        deployment = ours(
            models=(f"sim:{settings},tokenizer={folder}/tokenizer.json",),
            workers=options.workers,
            frontend_command=("-m", "benchmarks.long_prompts.timed_frontend", str(record)),
            frontend_flags=flags,
            wait_for=(MODEL,),
        )
        system = await stack.enter_async_context(deployment)
        await http_ready(system.http_port)
        run = LongPrompts(system, record, options, prompts, texts(tokenizer, SHORT_PROMPT_TOKENS, _SHORT_PROMPTS))
        await run.run()
        print(report(run, times, engine_times, options))
        return any(sent.errors for phase in (run.alone, run.beside) for sent in (phase.short, phase.long))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_prompts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="of a long prompt")
    parser.add_argument("--rate", type=float, default=10.0, help="long prompts a second")
    parser.add_argument("--short-rate", type=float, default=50.0, help="short requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="per phase and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32, help="different texts")
    parser.add_argument(
        "--fast", action=argparse.BooleanOptionalAction, default=True, help="tokenize with fastokens; without it, with tokenizers"
    )
    parser.add_argument("--brief", action="store_true", help="a run of some seconds, with shorter prompts")
    options = parser.parse_args()
    if options.brief:
        options.tokens, options.seconds, options.rounds, options.workers, options.prompts = 20_000, 2.0, 1, 1, 4
    return options


if __name__ == "__main__":
    sys.exit(uvloop.run(main(arguments())))
