"""Streams of text from an engine server that speaks OpenAI's API: by this project, and by a router that passes bytes on.

    python -m benchmarks.remote_text                               this project alone
    python -m benchmarks.remote_text --router /path/to/python      and the sglang-router that is installed for that interpreter

Both are in front of the same server (`benchmarks.text_engine`), which takes no time: chat completions are streams of 128 chunks,
of which one leaves in a write, or eight. Ours is a frontend, nats-server and a worker with `--url`; the router is one process.
What is compared is the CPU time for a stream, since all share the machine: the load average stands beside it. Rounds alternate
between both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.deployment import System, http_ready, ours, process
from benchmarks.http_client import connect
from benchmarks.measuring import Meter, Result, add_round_flags, chosen_cases, median, percentile, print_errors, table
from benchmarks.text_engine import MODEL
from dynamo.common.process.interpreter import interpreter
from dynamo.common.process.ports import free_ports

CHUNKS = 128
OURS, ROUTER = "ours", "sglang-router"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    concurrency: int
    together: int
    """Chunks that leave the server in one write."""


CASES = (
    Case("1 client, a chunk a write", 1, 1),
    Case("16 clients, a chunk a write", 16, 1),
    Case("1 client, 8 chunks a write", 1, 8),
    Case("16 clients, 8 chunks a write", 16, 8),
)


def http_request(case: Case) -> bytes:
    settings = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": CHUNKS, "seed": case.together}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **settings}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def router(python: str, engine_port: int, folder: Path) -> AsyncIterator[System]:
    """The router in front of the server, which has to be there already."""
    port, metrics_port = free_ports(2)
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", f"http://127.0.0.1:{engine_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(metrics_port)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    async with process(command, env, folder / "router.log") as child:
        await http_ready(port)
        yield System(ROUTER, 0, port, {ROUTER: child.pid})


async def run(case: Case, system: System, seconds: float) -> Result:
    """One case on one system, in a closed loop."""
    connections = [await connect(system.http_port, CHUNKS) for _ in range(case.concurrency)]
    request = http_request(case)
    result = Result(case.name, system.name, 0, 0.0)
    loop = asyncio.get_running_loop()

    async def client(number: int, until: float, record: bool) -> None:
        connection = connections[number]
        while loop.time() < until and not connection.broken:
            response = connection.send(request)
            await response.done
            if record and response.error:
                result.errors[response.error] = result.errors.get(response.error, 0) + 1
            elif record:
                result.done += 1
                result.latencies_s.append(response.ended_at - response.sent_at)
                result.first_s.append(response.first_at - response.sent_at)
                result.pieces += response.pieces

    async def load(duration: float, record: bool) -> None:
        until = loop.time() + duration
        await asyncio.gather(*(client(index, until, record) for index in range(case.concurrency)))

    await load(min(0.5, seconds / 3), record=False)
    with Meter(system.pids) as meter:
        await load(seconds, record=True)
    result.wall_s, result.cpu_s = meter.wall_s, meter.cpu_s
    for connection in connections:
        connection.close()
    return result


def report(results: Sequence[Result], cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        base = 0.0
        for system in (ROUTER, OURS):
            runs = [result for result in results if result.case == case.name and result.system == system]
            if not runs:
                continue
            parts = {name: median([_per_stream_ms(run, name) for run in runs]) for name in runs[0].cpu_s}
            proxied = sum(ms for name, ms in parts.items() if name in (ROUTER, "frontend", "worker"))
            base = proxied if system == ROUTER else base
            cells = [f"{proxied:.2f}", f"{proxied / base:.1f}" if base else "-"]
            cells += [f"{parts[name]:.2f}" if name in parts else "" for name in ("frontend", "worker", "nats")]
            cells += [f"{median([run.rate for run in runs]):,.0f}"]
            cells += [f"{median([percentile(run.first_s, 0.5) for run in runs]) * 1e3:.1f}"]
            cells += [f"{median([run.pieces / max(1, run.done) for run in runs]):.0f}"]
            rows.append([case.name, system, *cells])
    head = ["case", "system", "CPU ms a stream", "× router", "frontend", "worker", "nats-server"]
    return table([*head, "streams/s", "first p50 ms", "pieces"], rows)


def _per_stream_ms(result: Result, process_name: str) -> float:
    return result.cpu_s[process_name] * 1e3 / max(1, result.done)


async def main(options: argparse.Namespace) -> bool:
    """Return whether a request failed."""
    print(f"{interpreter()}, {os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}", flush=True)
    cases, results = chosen_cases(CASES, options), list[Result]()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-remote-")))
        [port] = free_ports(1)
        command = [sys.executable, "-m", "benchmarks.text_engine", str(port)]
        await stack.enter_async_context(process(command, dict(os.environ), folder / "engine.log"))
        worker = ("-m", "dynamo.worker", "--url", f"http://127.0.0.1:{port}", "--remote-kind", "text")
        systems = [await stack.enter_async_context(ours(worker_command=worker, wait_for=(MODEL,), name=OURS))]
        await http_ready(systems[0].http_port)
        if options.router:
            systems.append(await stack.enter_async_context(router(options.router, port, folder)))
        for number in range(options.rounds):
            for case in cases:
                for system in systems:
                    results.append(await run(case, system, options.seconds))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    print(report(results, cases))
    print(f"load average {os.getloadavg()[0]:.1f}")
    print_errors(results)
    return any(result.errors for result in results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", metavar="PYTHON", help="interpreter that has sglang-router installed")
    add_round_flags(parser, rounds=3)
    sys.exit(uvloop.run(main(parser.parse_args())))
