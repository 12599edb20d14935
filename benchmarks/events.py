"""What happens to requests while a fleet publishes more events than a frontend can follow.

    python -m benchmarks.events [--rate 120000] [--seconds 10] [--instances 200] [--unary 16] [--streams 32]

One frontend in `kv` mode serves small tensor requests and streams of text, before, during and after another fleet of the same
namespace publishes so many KV events and load reports a second. The table gives requests and streams of each phase, by when they
ended, and how often the frontend lost a connection to NATS or stopped following events.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httpx2

from benchmarks.deployment import System, ours
from benchmarks.kserve import SERVICE, tensor_request, text_request
from benchmarks.measuring import Meter, percentile, table
from dynamo.protos.inference_pb2 import ModelStreamInferResponse

_QUIET_S = 5.0
_FOLLOWS_S = 90.0
_PAUSE_S = 0.02
_STREAM_TOKENS = 300
_TENSOR = tensor_request("echo", (16,), bytes(64)).SerializeToString()
_METRICS = re.compile(r"^dynamo_frontend_(events_\w+|nats_reconnects_total)(?:\{connection=\"(\w+)\"\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Phase:
    """What ended while it lasted."""

    name: str
    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0
    streams: int = 0
    closed: int = 0
    """Streams that ended before their last token."""
    errors: set[str] = field(default_factory=set)
    frontend_cpu: float = 0.0
    """Cores."""


class Load:
    """Clients that send requests one after the other; what ends is counted in the present phase."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.phase = Phase("")
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelInfer")
        self._stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SERVICE + "ModelStreamInfer")

    async def unary(self) -> None:
        while True:
            begun_at = time.perf_counter()
            try:
                await self._infer(_TENSOR, timeout=60)
                self.phase.latencies_s.append(time.perf_counter() - begun_at)
            except grpc.aio.AioRpcError as error:
                self.phase.failed += 1
                self.phase.errors.add(f"{error.code().name}: {error.details()}")
            await asyncio.sleep(_PAUSE_S)

    async def streams(self, number: int) -> None:
        while True:
            error = await self._one_stream(number)
            self.phase.streams += 1
            if error:
                self.phase.closed += 1
                self.phase.errors.add(error)

    async def _one_stream(self, number: int) -> str:
        """Return why it ended early; empty if it did not."""

        async def request() -> AsyncIterator[bytes]:
            yield long_text_request(number)

        is_final = False
        try:
            async for data in self._stream(request(), timeout=120):
                message = ModelStreamInferResponse.FromString(data)
                if message.error_message:
                    return message.error_message
                is_final = message.infer_response.parameters["triton_final_response"].bool_param
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "" if is_final else "the stream ended without its last response"


def long_text_request(number: int) -> bytes:
    request = text_request("sim", b"prompt %d" % number)
    request.parameters["max_tokens"].int64_param = _STREAM_TOKENS
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request.SerializeToString()


async def figures(system: System) -> dict[str, float]:
    """Return the frontend's metrics of events and connections."""
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{system.http_port}/metrics", timeout=30)).text
    return {f"{name} {connection}".strip(): float(value) for name, connection, value in _METRICS.findall(text)}


@asynccontextmanager
async def flooding_fleet(system: System, arguments: argparse.Namespace) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ("-m", "benchmarks.event_flood", str(arguments.instances), str(arguments.rate), str(arguments.seconds))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, *command, env=system.env, stdin=pipe, stdout=pipe)
    assert child.stdin is not None and child.stdout is not None
    try:
        if await child.stdout.readline() != b"ready\n":
            raise RuntimeError("the flooding fleet did not start")
        yield child
    finally:
        child.stdin.close()
        await child.wait()


@dataclass(slots=True)
class Outcome:
    phases: list[Phase] = field(default_factory=list)
    published_per_s: float = 0.0
    lag_s: float = 0.0
    """The longest that was seen, twice a second."""
    follows_after_s: float = 0.0
    """How long after the last event the frontend followed events again."""
    figures: dict[str, float] = field(default_factory=dict)
    """The frontend's, at the end."""


async def measure(arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    async with (
        ours(models=("echo", "sim"), wait_for=("echo", "sim"), frontend_flags=("--router-mode", "kv")) as system,
        grpc.aio.insecure_channel(f"127.0.0.1:{system.grpc_port}") as channel,
        flooding_fleet(system, arguments) as fleet,
    ):
        assert fleet.stdin is not None and fleet.stdout is not None
        load = Load(channel)
        clients = [asyncio.create_task(load.unary()) for _ in range(arguments.unary)]
        clients += [asyncio.create_task(load.streams(number)) for number in range(arguments.streams)]

        async def watch() -> None:
            while True:
                outcome.figures = await figures(system)
                outcome.lag_s = max(outcome.lag_s, outcome.figures["events_lag_seconds"])
                await asyncio.sleep(0.5)

        clients.append(asyncio.create_task(watch()))

        @asynccontextmanager
        async def phase(name: str) -> AsyncIterator[None]:
            load.phase = Phase(name)
            outcome.phases.append(load.phase)
            with Meter({"frontend": system.pids["frontend"]}) as meter:
                yield
            load.phase.frontend_cpu = meter.cpu_s["frontend"] / meter.wall_s

        async with phase("before"):
            await asyncio.sleep(_QUIET_S)
        async with phase("during"):
            fleet.stdin.write(b"\n")
            outcome.published_per_s = float(await fleet.stdout.readline())
        async with phase("after"):
            outcome.follows_after_s = await followed_again(system)
            await asyncio.sleep(_QUIET_S)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return outcome


async def followed_again(system: System) -> float:
    """Return how long it took until the frontend follows events."""
    begun_at = time.perf_counter()
    async with asyncio.timeout(_FOLLOWS_S):
        while (await figures(system))["events_dropped"]:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.5)
    return time.perf_counter() - begun_at


def report(outcome: Outcome) -> str:
    rows = [
        [
            each.name,
            f"{len(each.latencies_s):,}",
            str(each.failed),
            *(f"{percentile(each.latencies_s, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0)),
            str(each.streams),
            str(each.closed),
            f"{each.frontend_cpu:.2f}",
        ]
        for each in outcome.phases
    ]
    head = ["phase", "requests", "failed", "p50 ms", "p99 ms", "max ms", "streams ended", "closed early", "frontend, cores"]
    last = outcome.figures
    lines = [
        table(head, rows),
        "",
        f"events published: {outcome.published_per_s:,.0f} a second",
        f"the frontend was up to {outcome.lag_s:.1f} s behind, stopped following events {last['events_drops_total']:.0f} times, "
        f"and followed them {outcome.follows_after_s:.1f} s after the last",
        f"connections to NATS lost: {last['nats_reconnects_total requests']:.0f} of requests, "
        f"{last['nats_reconnects_total events']:.0f} of events",
        *sorted(error for each in outcome.phases for error in each.errors),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.events", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=120_000, help="messages a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long")
    parser.add_argument("--instances", type=int, default=200, help="of the fleet that publishes")
    parser.add_argument("--unary", type=int, default=16, help="clients that send tensor requests")
    parser.add_argument("--streams", type=int, default=32, help="clients that read streams of text")
    print(report(asyncio.run(measure(parser.parse_args()))))
