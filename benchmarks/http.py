"""OpenAI's HTTP API: this project and NVIDIA Dynamo on the same machine in the same run.

    python -m benchmarks.http                              ours alone
    python -m benchmarks.http --peer /path/to/python       and the peer installed for that interpreter

Both sides have the same tokenizer, prompts of words that are one token each, and responses of 128 tokens, one SSE event per
token (none for the first half of a character). In the fast cases the engines are each side's own simulator without any pace,
so the servers are what is measured; both make several tokens between two reads of their streams, and `pieces per response`
tells how finely a response arrives at the client: fewer pieces are less work for all. In the paced cases both workers
make the first token at once and 40 a second from then on. All responses take the same time then, so clients that start together
stay together: in one case they do, in the other each starts at a moment of its own.
Each round runs every case on every system in turn; the table gives medians over rounds and ratios to the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.deployment import PACED_TOKENS_PER_S, System, http_ready, make_model, ours, peer, words_of
from benchmarks.http_client import connect
from benchmarks.measuring import Meter, Result, add_round_flags, chosen_cases, median, percentile, print_errors, table

TOKENS = 128
_PACED_S = 8.0
"""A paced case takes so long at least: an response takes 3.2 s."""
_PROMPTS = 256
_STEPS_PER_TURN = 16
"""Steps of our simulator without a pace, so that its bursts are about as long as those of the peer: see `pieces per response`."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    concurrency: int
    prompt_tokens: int = 128
    chat: bool = False
    paced: bool = False
    at_once: bool = False
    """In a paced case: all clients send at the same moment, again and again, instead of each at its own."""
    tokens: int = TOKENS
    """Tokens of a response; a single one is no stream."""


CASES = (
    Case("completions c=1", 1),
    Case("completions c=16", 16),
    Case("completions c=64", 64),
    Case("completions, 1024 in, c=64", 64, prompt_tokens=1024),
    Case("chat c=64", 64, chat=True),
    Case("chat, paced, c=128", 128, chat=True, paced=True),
    Case("chat, paced, c=128, all at once", 128, chat=True, paced=True, at_once=True),
)


def http_request(case: Case, model: str, words: Sequence[str], rng: random.Random) -> bytes:
    text = "".join(f" {word}" for word in rng.choices(words, k=case.prompt_tokens))
    prompt = {"messages": [{"role": "user", "content": text}]} if case.chat else {"prompt": text}
    settings: dict[str, object] = {"max_tokens": case.tokens, "ignore_eos": True}
    if case.tokens > 1:
        settings |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": model, **settings, **prompt}).encode()
    path = "/v1/chat/completions" if case.chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def run(case: Case, system: System, words: Sequence[str], seconds: float) -> Result:
    """One case on one system, in a closed loop."""
    rng = random.Random(7)
    model = "m" if system.name.startswith("peer") else "paced" if case.paced else "sim"
    requests = [http_request(case, model, words, rng) for _ in range(_PROMPTS)]
    connections = [await connect(system.http_port, case.tokens) for _ in range(case.concurrency)]
    result = Result(case.name, system.name, 0, 0.0)
    loop = asyncio.get_running_loop()

    async def client(number: int, until: float, record: bool) -> None:
        connection = connections[number]
        if case.paced and not case.at_once:
            await asyncio.sleep(rng.random() * TOKENS / PACED_TOKENS_PER_S)
        for request in itertools.islice(itertools.cycle(requests), number * 7, None):
            if loop.time() >= until or connection.broken:
                return
            response = connection.send(request)
            await response.done
            if not record:
                continue
            if response.error:
                result.errors[response.error] = result.errors.get(response.error, 0) + 1
                continue
            result.done += 1
            result.latencies_s.append(response.ended_at - response.sent_at)
            result.first_s.append((response.first_at or response.ended_at) - response.sent_at)
            result.pieces += response.pieces

    async def load(duration: float, record: bool) -> None:
        until = loop.time() + duration
        await asyncio.gather(*(client(index, until, record) for index in range(case.concurrency)))

    await load(min(0.5, seconds / 3), record=False)
    with Meter(system.pids) as meter:
        await load(max(seconds, _PACED_S) if case.paced else seconds, record=True)
    result.wall_s, result.cpu_s = meter.wall_s, meter.cpu_s
    for connection in connections:
        connection.close()
    return result


def report(results: Sequence[Result], cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        of_case = [result for result in results if result.case == case.name]
        base: dict[str, float] = {}
        for system in sorted({result.system for result in of_case}, key=lambda name: not name.startswith("peer")):
            runs = [result for result in of_case if result.system == system]
            figures = {
                "rate": median([run.rate for run in runs]) * TOKENS,
                "cpu": median([1e6 * run.cpu_s["frontend"] / max(1, run.done * TOKENS) for run in runs]),
                "first": median([percentile(run.first_s, 0.5) for run in runs]) * 1e3,
            }
            if system.startswith("peer"):
                base = figures
            ratio = {name: f"{figures[name] / base[name]:.2f}" if base.get(name) else "-" for name in figures}
            errors = sum(sum(run.errors.values()) for run in runs)
            latency = median([percentile(run.latencies_s, 0.5) for run in runs]) * 1e3
            pieces = median([run.pieces / max(1, run.done) for run in runs])
            cells = [f"{figures['rate']:,.0f}", ratio["rate"], f"{figures['first']:.1f}", ratio["first"]]
            cells += [f"{figures['cpu']:.1f}", ratio["cpu"], f"{latency:.1f}", f"{pieces:.0f}", str(errors)]
            rows.append([case.name, system, *cells])
    head = ["case", "system", "tok/s", "× peer", "first p50 ms", "× peer", "frontend CPU µs/token", "× peer", "p50 ms"]
    return table([*head, "pieces per response", "errors"], rows)


def worker_command(tokenizer: Path, paced: bool) -> tuple[str, ...]:
    """Return the arguments of Python that start our simulated worker."""
    if paced:
        return ("-m", "benchmarks.paced_worker", str(tokenizer), str(PACED_TOKENS_PER_S))
    return ("-m", "dynamo.worker", "--model", f"sim:speedup=0,steps_per_turn={_STEPS_PER_TURN},tokenizer={tokenizer}")


async def systems_under_test(
    stack: AsyncExitStack, arguments: argparse.Namespace, cases: Sequence[Case], tokenizer: Path
) -> list[tuple[System, bool]]:
    """Each with whether it has the paced model."""
    systems: list[tuple[System, bool]] = []
    for paced in sorted({case.paced for case in cases}):
        system = await stack.enter_async_context(ours(worker_command=worker_command(tokenizer, paced), wait_for=(), name="ours"))
        await http_ready(system.http_port)
        systems.append((system, paced))
        if arguments.peer:
            systems.append((await stack.enter_async_context(peer(arguments.peer, "paced" if paced else "mocker")), paced))
    return systems


async def main(arguments: argparse.Namespace) -> None:
    cases = chosen_cases(CASES, arguments)
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-model-")))
        await make_model(sys.executable, folder)
        tokenizer = folder / "model" / "tokenizer.json"
        words = words_of(tokenizer)
        systems = await systems_under_test(stack, arguments, cases, tokenizer)
        for number in range(arguments.rounds):
            for case in cases:
                for system, paced in systems:
                    if paced == case.paced:
                        results.append(await run(case, system, words, arguments.seconds))
            print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    print(report(results, cases))
    print_errors(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has NVIDIA Dynamo installed")
    add_round_flags(parser, rounds=3)
    uvloop.run(main(parser.parse_args()))
