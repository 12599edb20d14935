"""Whether memory stays flat: mixed load of all sizes and protocols, with what each process holds, minute by minute.

    python -m benchmarks.soak [--minutes 60] [--rate 20] [--largest 60] [--burst 8]

Two frontends, one with each gRPC server, and a worker. Small tensors, text streams over gRPC and HTTP and requests that are wrong
go on all the time, `--rate` a second. Every ten seconds `--burst` tensors of 1 MiB to `--largest` MiB are sent at once, by turns
over each gRPC server and REST. The last lines compare the median of the last third with the start: the promise is a factor of at
most 1.3 for frontends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import grpc.aio
import httpx2

from benchmarks.deployment import System, ours
from benchmarks.kserve import SERVICE, tensor_request, text_request
from benchmarks.measuring import median, rss_mib
from dynamo.protos.inference_pb2 import ModelInferResponse, ModelStreamInferResponse

MIB = 2**20
SERVERS = ("grpcio", "http2")
_BURST_EVERY_S = 10.0
_TIMEOUT_S = 120
_TOKENS = 32
_GAUGES = ("open_streams", "free_credit_bytes", "shared_memory_used_bytes")
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass(slots=True)
class Counts:
    """How requests ended."""

    done: int = 0
    failed: int = 0
    last_failure: str = ""


class SoakClient:
    """A client of one frontend. Each method sends one request and raises RuntimeError for a wrong response."""

    def __init__(self, channel: grpc.aio.Channel, http: httpx2.AsyncClient) -> None:
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelInfer")
        self._stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SERVICE + "ModelStreamInfer")
        self._http = http

    async def tensor(self, size: int) -> None:
        request = tensor_request("echo", (size // 4,), bytes(size))
        response = ModelInferResponse.FromString(await self._infer(request.SerializeToString(), timeout=_TIMEOUT_S))
        _check(len(response.raw_output_contents[0]) == size, "a tensor of another size")

    async def rest_tensor(self, size: int) -> None:
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"inference-header-content-length": str(len(head))}
        response = await self._http.post("/v2/models/echo/infer", content=head + bytes(size), headers=headers)
        _check(response.status_code == 200 and len(response.content) > size, f"status {response.status_code}")

    async def text_stream(self) -> None:
        request = text_request("echo-llm", b"x" * _TOKENS)
        request.parameters["max_tokens"].int64_param = _TOKENS

        async def sent() -> AsyncIterator[bytes]:
            yield request.SerializeToString()

        text = b""
        async for data in self._stream(sent(), timeout=_TIMEOUT_S):
            message = ModelStreamInferResponse.FromString(data)
            _check(not message.error_message, message.error_message)
            response = message.infer_response
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
                if output.name == "text_output":
                    text += raw[4:]
        _check(text == b"x" * _TOKENS, f"the text {text!r}")

    async def completion(self) -> None:
        body = {"model": "echo-llm", "prompt": "x" * _TOKENS, "max_tokens": _TOKENS, "stream": True}
        response = await self._http.post("/v1/completions", json=body)
        _check(response.status_code == 200 and response.text.rstrip().endswith("[DONE]"), f"status {response.status_code}")

    async def wrong_requests(self) -> None:
        response = await self._http.post("/v2/models/absent/infer", content=bytes(MIB))
        _check(response.status_code in (400, 404), f"status {response.status_code}")
        try:
            await self._infer(bytes(64), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _check(error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"status {error.code()}")
        else:
            raise RuntimeError("a request without a model got a response")

    async def gauges(self) -> dict[str, float]:
        """Return open streams, free credit and lent shared memory of the frontend."""
        text = (await self._http.get("/metrics")).text
        return {name: float(match[1]) for name in _GAUGES if (match := re.search(rf"^dynamo_frontend_{name} (\S+)$", text, re.M))}


def _check(condition: bool, received: str) -> None:
    if not condition:
        raise RuntimeError(f"a request got {received}")


class Soak:
    """One run against a running deployment."""

    def __init__(self, system: System, clients: Sequence[SoakClient], options: argparse.Namespace) -> None:
        self._clients = clients
        self._options = options
        self._pids = {name: pid for name, pid in system.pids.items() if name != "nats"}
        self._counts = Counts()
        self._rng = random.Random(0)
        self._sizes = [MIB << power for power in range(8) if 1 << power <= options.largest]
        self._memory: dict[str, list[float]] = {name: [] for name in self._pids}

    @property
    def failed(self) -> int:
        """The number of requests that failed."""
        return self._counts.failed

    async def run(self) -> None:
        """Send requests for `--minutes`, and print a line each minute."""
        print(
            "minute  requests  failed  "
            + "  ".join(f"{name}: MiB fds threads" for name in self._pids)
            + "  streams  credit, MiB  lent in shared memory, MiB"
        )
        await self._report(0)
        until = time.monotonic() + 60 * self._options.minutes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._small_requests(until))
            tasks.create_task(self._bursts(until))
            tasks.create_task(self._reports(until))
        last = max(1, len(self._memory["frontend"]) // 3)
        for name, values in self._memory.items():
            start, end = values[0], median(values[-last:])
            growth = f"{end / start:.2f} ×, at most {max(values):.0f} MiB"
            print(f"{name}: {start:.0f} MiB at the start, {end:.0f} MiB in the last third: {growth}")

    async def _small_requests(self, until: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until:
                client = self._rng.choice(self._clients)
                kinds: list[Callable[[], Awaitable[None]]] = [
                    lambda client=client: client.tensor(64),  # type: ignore[misc]
                    lambda client=client: client.rest_tensor(64),  # type: ignore[misc]
                    client.text_stream,
                    client.completion,
                    client.wrong_requests,
                ]
                tasks.create_task(self._one(self._rng.choice(kinds)))
                await asyncio.sleep(1 / self._options.rate)

    async def _bursts(self, until: float) -> None:
        turn = 0
        while time.monotonic() + _BURST_EVERY_S < until:
            client = self._clients[turn % len(self._clients)]
            send = client.tensor if turn // len(self._clients) % 2 else client.rest_tensor
            sizes = [self._rng.choice(self._sizes) for _ in range(self._options.burst - 1)]
            async with asyncio.TaskGroup() as tasks:
                for size in (*sizes, self._options.largest * MIB):
                    tasks.create_task(self._one(lambda send=send, size=size: send(size)))  # type: ignore[misc]
            turn += 1
            await asyncio.sleep(_BURST_EVERY_S)

    async def _reports(self, until: float) -> None:
        minute = 0
        while time.monotonic() < until:
            await asyncio.sleep(min(60.0, max(0.1, until - time.monotonic())))
            minute += 1
            await self._report(minute)

    async def _one(self, send: Callable[[], Awaitable[None]]) -> None:
        try:
            await send()
            self._counts.done += 1
        except (RuntimeError, grpc.aio.AioRpcError, httpx2.HTTPError) as error:
            self._counts.failed += 1
            self._counts.last_failure = repr(error)[:300]

    async def _report(self, minute: int) -> None:
        held = []
        for name, pid in self._pids.items():
            self._memory[name].append(rss_mib(pid))
            files, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
            held.append(f"{self._memory[name][-1]:6.0f} {files:4d} {threads:4d}")
        gauges = [await client.gauges() for client in self._clients]
        streams = sum(gauge.get("open_streams", 0) for gauge in gauges)
        credit = min(gauge.get("free_credit_bytes", 0) for gauge in gauges) / MIB
        lent = sum(gauge.get("shared_memory_used_bytes", 0) for gauge in gauges) / MIB
        counts = self._counts
        numbers = f"{streams:.0f}  {credit:.0f}  {lent:.0f}"
        print(f"{minute:4d} {counts.done:9d} {counts.failed:5d}  {'  |'.join(held)}  {numbers}", flush=True)
        if counts.last_failure:
            print(f"     last failure: {counts.last_failure}", flush=True)
            counts.last_failure = ""


async def soak(options: argparse.Namespace) -> int:
    """Return the number of requests that failed."""
    async with AsyncExitStack() as stack:
        deployment = ours(
            grpc_server=SERVERS[0],
            more_frontends=SERVERS[1:],
            models=("echo", "echo:llm"),
            wait_for=("echo", "echo-llm"),
            worker_flags=options.worker_flag,
        )
        system = await stack.enter_async_context(deployment)
        clients = []
        for grpc_port, http_port in system.frontend_ports:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=_OPTIONS))
            http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=_TIMEOUT_S)
            clients.append(SoakClient(channel, await stack.enter_async_context(http)))
        run = Soak(system, clients, options)
        await run.run()
        return run.failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Whether memory stays flat.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=20, help="small requests a second")
    parser.add_argument(
        "--largest", type=int, default=60, help="MiB of the largest tensor; frontends take 64 MiB with all around it"
    )
    parser.add_argument("--burst", type=int, default=8, help="large tensors at once")
    parser.add_argument("--worker-flag", action="append", default=[], help="for the worker, may be given several times")
    options = parser.parse_args()
    if options.minutes <= 0 or options.rate <= 0 or min(options.largest, options.burst) < 1:
        sys.exit("--minutes and --rate must be positive, --largest and --burst at least 1")
    sys.exit(1 if asyncio.run(soak(options)) else 0)


if __name__ == "__main__":
    main()
