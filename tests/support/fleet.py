"""A deployment of real processes for tests that break it: workers and frontends over a real etcd and nats-server.

    async with Fleet(etcd, nats, namespace) as fleet:
        await fleet.start(workers=2)
        async with fleet.frontends[0].client() as client, client.load() as load:
            fleet.workers[0].kill()
            await load.completed(200)
        assert load.failures == []

Clients speak KServe over gRPC with our own stubs. Every wait is bounded, and is for an event or for what the other side says.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import httpx2
import msgspec

from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import NatsOptions
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.protos import inference_pb2 as pb
from tests.support.processes import FrontendProcess, Process, Reachable, frontend, worker
from tests.support.servers import NatsServer

SERVICE = "/inference.GRPCInferenceService/"
_POLL_S = 0.05
_CHANNEL = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def echo_request(raw: bytes = bytes(8), *, model: str = "echo", id_: str = "1", **parameters: int | str) -> bytes:
    """For the engine `echo` and others of its input: an FP32 tensor of these bytes. `delay_ms` is one of its parameters."""
    request = pb.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[len(raw) // 4])
    request.raw_input_contents.append(raw)
    for name, value in parameters.items():
        if isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = value
    return request.SerializeToString()


def text_request(prompt: str, tokens: int, *, model: str = "sim", id_: str = "t", temperature: float | None = None) -> bytes:
    """For a language model: a streamed answer of exactly so many tokens."""
    request = pb.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = tokens
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["seed"].int64_param = 7
    if temperature is not None:
        request.parameters["temperature"].double_param = temperature
    return request.SerializeToString()


@dataclass
class Text:
    """What came of one streamed answer so far."""

    text: str = ""
    reason: str = ""
    messages: int = 0
    longest_silence_s: float = 0.0
    _last_message_s: float = field(default_factory=time.monotonic)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, message: pb.ModelStreamInferResponse) -> None:
        assert not message.error_message, message.error_message
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self._last_message_s)
        self._last_message_s = now
        self.messages += 1
        response = message.infer_response
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            for value in decode_bytes(raw, output.shape[0]):
                if output.name == "text_output":
                    self.text += value.decode()
                elif output.name == "finish_reason":
                    self.reason = value.decode() or self.reason
        self._news.set()

    async def at_least(self, messages: int, timeout_s: float = 120) -> None:
        """Returns when so many messages have come."""
        async with asyncio.timeout(timeout_s):
            while self.messages < messages:
                self._news.clear()
                await self._news.wait()


class Client:
    """A connection of its own to one frontend, or several."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelInfer")
        self._stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SERVICE + "ModelStreamInfer")

    async def infer(self, request: bytes, timeout_s: float | None = 120, **metadata: str) -> pb.ModelInferResponse:
        """The answer. Metadata `x_dynamo_instance` is sent as `x-dynamo-instance`."""
        headers = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return pb.ModelInferResponse.FromString(await self._infer(request, timeout=timeout_s, metadata=headers))

    async def stream(
        self, requests: Sequence[bytes], timeout_s: float = 120
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Return the messages that one ModelStreamInfer call with these requests gets."""

        async def sent() -> AsyncIterator[bytes]:
            for request in requests:
                yield request

        call = self._stream(sent(), timeout=timeout_s)
        try:
            async for data in call:
                yield pb.ModelStreamInferResponse.FromString(data)
        finally:
            call.cancel()  # one that was left keeps its connection open otherwise, until it is collected

    async def text(self, request: bytes, into: Text | None = None, timeout_s: float = 120) -> Text:
        """The whole text of one streamed answer."""
        text = into if into is not None else Text()
        async for message in self.stream([request], timeout_s):
            text.add(message)
        return text

    async def statistics(self, model: str = "echo") -> pb.ModelStatistics:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(SERVICE + "ModelStatistics")
        data = await call(pb.ModelStatisticsRequest(name=model).SerializeToString(), timeout=120)
        [statistics] = pb.ModelStatisticsResponse.FromString(data).model_stats
        return statistics

    @asynccontextmanager
    async def load(self, at_once: int = 8, request: Callable[[int], bytes] | None = None) -> AsyncIterator[Load]:
        """Requests without a pause while the body runs; what is open at its end is waited for."""
        load = Load(self, request or (lambda number: echo_request(number.to_bytes(8, "little"))))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(load.run())
            try:
                yield load
            finally:
                load.stop()


class Load:
    """What became of many requests."""

    def __init__(self, client: Client, request: Callable[[int], bytes]) -> None:
        self.count = 0
        self.failures: list[str] = []
        self._client = client
        self._request = request
        self._numbers = itertools.count()
        self._stop = asyncio.Event()
        self._news = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        while not self._stop.is_set():
            request = self._request(next(self._numbers))
            try:
                response = await self._client.infer(request)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
            else:
                sent = pb.ModelInferRequest.FromString(request)
                if list(response.raw_output_contents) != list(sent.raw_input_contents):
                    self.failures.append("the answer of another request")
                self.count += 1
            self._news.set()

    async def completed(self, more: int, timeout_s: float = 120) -> None:
        """Return when so many more requests have completed."""
        goal = self.count + more
        async with asyncio.timeout(timeout_s):
            while self.count < goal:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def connect(*targets: str) -> AsyncIterator[Client]:
    """A client of one frontend, or of several between which gRPC itself spreads calls."""
    options: list[tuple[str, Any]] = [*_CHANNEL]
    target = targets[0]
    if len(targets) > 1:
        target = "ipv4:" + ",".join(targets)
        options.append(("grpc.lb_policy_name", "round_robin"))
        options.append(("grpc.default_authority", "localhost"))  # else it is the list
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield Client(channel)


@dataclass
class FleetWorker:
    process: Process

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def instance(self) -> str:
        """Its id, as it says in its log."""
        match = re.search(r"as instance ([0-9a-f]+)", "\n".join(self.process.lines))
        assert match is not None, self.process.log()
        return match[1]

    @property
    def served(self) -> set[tuple[str, str]]:
        """The id and the model of each of its registrations, as it says in its log; models whose files come later, later."""
        said = re.findall(r"serving (.+) at \S+ as instance", "\n".join(self.process.lines))
        assert said, self.process.log()
        return {(self.instance, model) for model in said[-1].split(", ")}

    async def serving(self) -> None:
        await self.process.logged("as instance")

    def kill(self) -> None:
        self.process.process.kill()

    async def killed(self) -> None:
        """Kills it, and returns when it is dead."""
        self.kill()
        await self.process.ended()


@dataclass
class FleetFrontend:
    process: FrontendProcess

    @property
    def target(self) -> str:
        return self.process.grpc_target

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with connect(self.target) as client:
            yield client

    async def sees(self, *workers: FleetWorker, timeout_s: float = 120) -> None:
        """Returns when exactly these workers stand behind it, with all their models, and it is ready."""
        wanted: set[tuple[str, str]] = set()
        seen: set[tuple[str, str]] = set()
        status = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    assert self.process.process.returncode is None, self.process.log()
                    with suppress(httpx2.TransportError):
                        status, health = await self.process.health()
                        seen = {(instance["instance_id"], instance["model"]) for instance in health.get("instances", ())}
                        wanted = {each for worker in workers for each in worker.served}
                        if seen == wanted and (status == 200 or not wanted):
                            return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"instances are {seen}, not {wanted}; health says {status}") from None

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its label sets that contain these."""
        async with httpx2.AsyncClient(verify=False) as client:  # reading the system's certificates takes 22 ms
            text = (await client.get(f"http://127.0.0.1:{self.process.http_port}/metrics")).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if re.match(rf"{name}[{{ ]", line) and all(part in line for part in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Fleet:
    """Processes that can be started at any time, and that all end when the context does."""

    def __init__(self, etcd: Reachable, nats: NatsServer, namespace: str, model: Sequence[str] = ("--model", "echo")) -> None:
        self.etcd = etcd
        self.nats = nats
        self.namespace = namespace
        self.model = tuple(model)
        self.workers: list[FleetWorker] = []
        self.frontends: list[FleetFrontend] = []
        self._paused: set[int] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pid in list(self._paused):
            self.resume(pid)
        await self._stack.__aexit__(kind, error, trace)

    @property
    def processes(self) -> list[Process]:
        return [*(each.process for each in self.workers), *(each.process for each in self.frontends)]

    async def start(self, *, workers: int = 1, frontends: int = 1, frontend_flags: Sequence[str] = ()) -> None:
        """Starts so many of each, at once, and returns when all of them know each other."""
        for _ in range(workers):
            await self.add_worker()
        for _ in range(frontends):
            await self.add_frontend(*frontend_flags)
        for each in self.workers:
            await each.serving()
        for front in self.frontends:
            await front.sees(*self.workers)

    async def add_worker(self, *flags: str, sources: Sequence[Path] = ()) -> FleetWorker:
        """Not awaited: see `FleetWorker.serving`."""
        process = await self._stack.enter_async_context(
            worker(self.etcd, self.nats, self.namespace, *self.model, *flags, sources=sources)
        )
        self.workers.append(FleetWorker(process))
        return self.workers[-1]

    async def add_frontend(self, *flags: str, sources: Sequence[Path] = ()) -> FleetFrontend:
        """Not awaited: see `FleetFrontend.sees`."""
        process = await self._stack.enter_async_context(
            frontend(self.etcd.endpoint, self.nats.url, self.namespace, *flags, sources=sources)
        )
        self.frontends.append(FleetFrontend(process))
        return self.frontends[-1]

    def pause(self, pid: int) -> None:
        """Hangs a process."""
        os.kill(pid, signal.SIGSTOP)
        self._paused.add(pid)

    def resume(self, pid: int) -> None:
        self._paused.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def statistics(self, worker: FleetWorker, model: str = "echo") -> pb.ModelStatistics:
        """What one worker says of itself, asked on the bus past all frontends."""
        instance = InstanceId(int(worker.instance, 16))
        subject = Endpoint(self.namespace).rpc_subject(instance)
        body = msgspec.msgpack.encode({"model": model})
        async with (
            connect_nats(NatsOptions(servers=(self.nats.url,)), "test") as connection,
            open_client(connection, self.namespace) as client,
            asyncio.timeout(120),
        ):
            response = await client.open(instance, subject, "statistics", body).result()
        [statistics] = pb.ModelStatisticsResponse.FromString(bytes(response)).model_stats
        return statistics
