"""Whether memory stays flat: many small requests and streams over one deployment, with its memory before, on the way and after.

    python -m benchmarks.soak [--requests 100000] [--streams 2000] [--rounds 5] [--grpc-server auto] [--at-once 32]

A round is an equal share of all requests and streams. The first one fills caches and pools, so the growth that matters, printed
last, is that from the end of the first round to the end of the last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from benchmarks.deployment import ours
from benchmarks.measuring import rss_mib, table
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

SERVICE = "/inference.GRPCInferenceService/"
_VALUES = bytes(64)
_TOKENS = 32


def tensor_request(number: int) -> bytes:
    request = ModelInferRequest(model_name="echo", id=str(number), raw_input_contents=[_VALUES])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[len(_VALUES) // 4])
    return request.SerializeToString()


def text_request(number: int) -> bytes:
    request = ModelInferRequest(model_name="echo-llm", id=str(number))
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"%032d" % number)
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = _TOKENS
    return request.SerializeToString()


async def many(count: int, at_once: int, one: Callable[[int], Awaitable[None]]) -> None:
    """`one` for each number below `count`, so many at a time."""
    numbers = itertools.count()

    async def work() -> None:
        while (number := next(numbers)) < count:
            await one(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())


async def soak(requests: int, streams: int, rounds: int, at_once: int, grpc_server: str) -> str:
    """Return the table of all rounds. Raises RuntimeError for a request that fails or gets a wrong response."""
    rows: list[list[str]] = []
    async with ours(grpc_server=grpc_server, models=("echo", "echo:llm"), wait_for=("echo", "echo-llm")) as system:
        pids = {name: pid for name, pid in system.pids.items() if name != "nats"}

        def look(label: str, rate: str) -> dict[str, float]:
            memory = {name: rss_mib(pid) for name, pid in pids.items()}
            rows.append([label, rate, *(f"{memory[name]:.1f}" for name in pids)])
            return memory

        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.grpc_port}") as channel:
            infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelInfer")
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SERVICE + "ModelStreamInfer")

            async def infer_once(number: int) -> None:
                response = ModelInferResponse.FromString(await infer(tensor_request(number), timeout=60))
                if response.id != str(number) or response.raw_output_contents[0] != _VALUES:
                    raise RuntimeError(f"request {number} got a wrong response")

            async def stream_once(number: int) -> None:
                async def sent() -> AsyncIterator[bytes]:
                    yield text_request(number)

                text = b""
                async for data in stream(sent(), timeout=60):
                    message = ModelStreamInferResponse.FromString(data)
                    for output in message.infer_response.outputs:
                        if output.name == "text_output":
                            text += b"".join(output.contents.bytes_contents)
                if text != b"%032d" % number:
                    raise RuntimeError(f"stream {number} got a wrong response: {text!r} {message.error_message}")

            look("before", "")
            settled: dict[str, float] = {}
            memory: dict[str, float] = {}
            for round_ in range(1, rounds + 1):
                begun = time.perf_counter()
                await many(requests // rounds, at_once, infer_once)
                await many(streams // rounds, at_once, stream_once)
                took_s = time.perf_counter() - begun
                memory = look(f"round {round_}", f"{(requests + streams) / rounds / took_s:.0f}/s")
                settled = settled or memory
        later = (requests + streams) * (rounds - 1) / rounds
        rows.append(["growth since round 1", "", *(f"{memory[name] - settled[name]:+.1f}" for name in pids)])
        rows.append(
            [
                "bytes per request",
                "",
                *(f"{(memory[name] - settled[name]) * 2**20 / later if later else 0:+.0f}" for name in pids),
            ]
        )
    return table(["after", "requests", *(f"{name}, MiB" for name in pids)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Whether memory stays flat.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--grpc-server", default="auto", choices=("auto", "native", "grpcio"))
    options = parser.parse_args()
    if min(options.requests, options.streams, options.rounds, options.at_once) < 1:
        sys.exit("all numbers must be at least 1")
    print(asyncio.run(soak(options.requests, options.streams, options.rounds, options.at_once, options.grpc_server)))


if __name__ == "__main__":
    main()
