"""KServe v2 over gRPC: this project, with either gRPC server, and NVIDIA Dynamo on the same machine in the same run.

    python -m benchmarks.kserve                              ours alone
    python -m benchmarks.kserve --peer /path/to/python       and the peer installed for that interpreter

Each round runs every case on every system, one after the other, so that a machine whose speed drifts treats all alike; the
table gives medians over rounds and ratios to the peer. Both language models have the same tokenizer; tokens per second are
finished requests times their 128 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.deployment import System, make_model, ours, peer
from benchmarks.grpc_client import GrpcConnection, connect, message, request_headers
from benchmarks.measuring import Meter, Result, add_round_flags, chosen_cases, median, percentile, print_errors, table
from dynamo.protos.inference_pb2 import ModelInferRequest

SERVICE = "/inference.GRPCInferenceService/"
TOKENS = 128
ECHO_MODEL = "echo:INPUT0=FP32[-1]"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    concurrency: int
    shape: tuple[int, ...] = ()
    """Shape of the FP32 tensor in a request; empty: a text stream."""
    model: str = "echo"
    """Which takes the tensor."""

    @property
    def is_text(self) -> bool:
        return not self.shape


CASES = (
    Case("64 B c=1", 1, (16,)),
    Case("64 B c=16", 16, (16,)),
    Case("64 B c=64", 64, (16,)),
    Case("64 KiB c=16", 16, (16_384,)),
    Case("1 MiB c=1", 1, (262_144,)),
    Case("1 MiB c=16", 16, (262_144,)),
    Case("text c=1", 1),
    Case("text c=16", 16),
    Case("text c=64", 64),
)


def tensor_request(model: str, shape: Sequence[int], data: bytes) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model, id="1", raw_input_contents=[data])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
    return request


def text_request(model: str, prompt: bytes) -> ModelInferRequest:
    """Return a request for a stream of text."""
    request = ModelInferRequest(model_name=model, id="1")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt)
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return request


def tensor_body(model: str, shape: Sequence[int]) -> bytes:
    values = np.linspace(0, 1, math.prod(shape), dtype=np.float32)
    return message(tensor_request(model, shape, values.tobytes()).SerializeToString())


def text_body(model: str, rng: random.Random, parameters: bool) -> bytes:
    """A prompt of 128 short words. The peer takes no parameters on this path."""
    prompt = " ".join(rng.choices(("time", "year", "people", "way", "day", "man", "thing", "life"), k=128))
    request = text_request(model, prompt.encode())
    if parameters:
        request.parameters["max_tokens"].int64_param = TOKENS
        request.parameters["ignore_eos"].bool_param = True
    return message(request.SerializeToString())


async def run(case: Case, system: System, text_model: str, seconds: float) -> Result:
    """One case on one system, in a closed loop."""
    host = "127.0.0.1"
    connections = [await connect(host, system.grpc_port) for _ in range(min(case.concurrency, 8))]
    method = "ModelStreamInfer" if case.is_text else "ModelInfer"
    headers = request_headers(SERVICE + method, f"{host}:{system.grpc_port}")
    rng = random.Random(7)
    is_peer = system.name.startswith("peer")
    bodies = (
        [text_body(text_model, rng, not is_peer) for _ in range(64)] if case.is_text else [tensor_body(case.model, case.shape)]
    )
    result = Result(case.name, system.name, 0, 0.0)
    loop = asyncio.get_running_loop()

    async def client(number: int, connection: GrpcConnection, until: float, record: bool) -> None:
        while loop.time() < until:
            number += 1
            reply = connection.call(headers, bodies[number % len(bodies)])
            await reply.done
            if not record:
                continue
            if reply.status or not reply.messages:
                what = f"{reply.status} {reply.detail}"[:200]
                result.errors[what] = result.errors.get(what, 0) + 1
                if connection.broken:
                    return
                continue
            result.done += 1
            result.latencies_s.append(reply.ended_at - reply.sent_at)
            result.first_s.append(reply.first_at - reply.sent_at)

    async def load(duration: float, record: bool) -> None:
        until = loop.time() + duration
        await asyncio.gather(*(client(i * 3, connections[i % len(connections)], until, record) for i in range(case.concurrency)))

    await load(min(0.5, seconds / 3), record=False)
    with Meter(system.pids) as meter:
        await load(seconds, record=True)
    result.wall_s, result.cpu_s = meter.wall_s, meter.cpu_s
    for connection in connections:
        connection.close()
    return result


def report(results: Sequence[Result], systems: Sequence[str], cases: Sequence[Case]) -> str:
    rows = []
    reference = next((name for name in systems if name.startswith("peer")), None)
    for case in cases:
        base: dict[str, float] = {}
        for system in sorted(systems, key=lambda name: name != reference):
            runs = [result for result in results if result.case == case.name and result.system == system]
            if not runs:
                continue
            rate = median([run.rate for run in runs]) * (TOKENS if case.is_text else 1)
            unit = "tok/s" if case.is_text else "rps"
            cpu = {
                name: median([1e3 * run.cpu_s[name] / max(1, run.done) for run in runs])
                for name in ("frontend", "worker", "nats")
            }
            errors = sum(sum(run.errors.values()) for run in runs)
            if system == reference:
                base = {"rate": rate, "worker": cpu["worker"]}
            ratio = f"{rate / base['rate']:.2f}" if base.get("rate") else "-"
            work = f"{cpu['worker'] / base['worker']:.2f}" if base.get("worker") and rate and base["rate"] else "-"
            latency = median([percentile(run.latencies_s, 0.5) for run in runs]) * 1e3
            first = median([percentile(run.first_s, 0.5) for run in runs]) * 1e3
            rows.append(
                [case.name, system, f"{rate:,.0f} {unit}", ratio, f"{latency:.2f}", f"{first:.2f}"]
                + [f"{cpu[name]:.3f}" for name in ("frontend", "worker", "nats")]
                + [work, str(errors)]
            )
    head = ["case", "system", "rate", "× peer", "p50 ms", "first p50 ms", "frontend CPU ms", "worker CPU ms", "nats CPU ms"]
    return table([*head, "worker × peer", "errors"], rows)


async def main(arguments: argparse.Namespace) -> None:
    cases = chosen_cases(CASES, arguments)
    servers = arguments.grpc_server or ["http2", "grpcio"]
    results: list[Result] = []
    names: list[str] = []
    async with AsyncExitStack() as stack:
        systems: list[tuple[System, str, bool | None]] = []
        for server in servers:
            models = [ECHO_MODEL]
            if any(case.is_text for case in cases):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-model-")))
                await make_model(sys.executable, folder)
                models.append(f"echo:llm:{folder}/model/tokenizer.json")
            waits = ["echo", *(["echo-llm"] if len(models) > 1 else [])]
            system = await stack.enter_async_context(ours(grpc_server=server, models=models, wait_for=waits))
            systems.append((system, "echo-llm", None))
        if arguments.peer:
            if any(not case.is_text for case in cases):
                for plane in ("nats", "tcp"):
                    system = await stack.enter_async_context(peer(arguments.peer, "echo", plane))
                    systems.append((system, "", False))
            if any(case.is_text for case in cases):
                system = await stack.enter_async_context(peer(arguments.peer, "tokens", "nats"))
                systems.append((system, "m", True))
        names = list(dict.fromkeys(system.name for system, _, _ in systems))
        for number in range(arguments.rounds):
            for case in cases:
                for system, text_model, only_text in systems:
                    if only_text is not None and only_text != case.is_text:
                        continue
                    results.append(await run(case, system, text_model, arguments.seconds))
            print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    print(report(results, names, cases))
    print_errors(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has NVIDIA Dynamo installed")
    add_round_flags(parser, rounds=3)
    parser.add_argument("--grpc-server", action="append", choices=["http2", "grpcio"])
    uvloop.run(main(parser.parse_args()))
