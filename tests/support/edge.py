"""The frontend's gRPC edge on a real port, with the real data plane behind it and instances in memory behind that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from dynamo.common.model_card import ModelCard
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.service import SERVICE, KserveService
from dynamo.frontend.api.rpc.bounded import bounded
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES, HealthService, ReflectionService
from dynamo.frontend.api.rpc.metered import metered
from dynamo.frontend.api.rpc.server import GrpcServer, serve_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import CapacityOptions, GrpcOptions, OverloadStatus, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.port_metrics import GrpcServerMetrics
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.serving.queue.starting import StandbyModels
from dynamo.protos import inference_pb2 as pb
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeStream, fake_texts, in_memory, instance

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Edge:
    plane: DataPlane
    directory: FakeDirectory
    client: FakeClient
    readiness: Readiness
    drain: StreamDrain
    server: GrpcServer
    channel: grpc.aio.Channel
    registry: CollectorRegistry
    capacity: Capacity

    async def call(self, method: str, request: object, **options: object) -> bytes:
        """One unary call with a message or raw bytes, answered with raw bytes."""
        data = request if isinstance(request, bytes) else request.SerializeToString()  # type: ignore[attr-defined]
        response: bytes = await self.channel.unary_unary(f"/{SERVICE}/{method}")(data, **options)  # type: ignore[arg-type]
        return response

    async def infer(self, request: pb.ModelInferRequest, **options: object) -> pb.ModelInferResponse:
        return pb.ModelInferResponse.FromString(await self.call("ModelInfer", request, **options))

    def stream(self, **options: object) -> Stream:
        return Stream(self.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(**options))  # type: ignore[arg-type]


class WatchedThread(Offload):
    """A thread that tells what it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.has_run: list[str] = []

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.has_run.append(getattr(function, "__name__", ""))
        return await super().run(function, *args, **kwargs)


class Stream:
    """A ModelStreamInfer call."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self.call = call

    async def send(self, *requests: pb.ModelInferRequest | bytes) -> None:
        for request in requests:
            await self.call.write(request if isinstance(request, bytes) else request.SerializeToString())

    async def read(self) -> pb.ModelStreamInferResponse:
        data = await self.call.read()
        assert isinstance(data, bytes), "the stream has ended"
        return pb.ModelStreamInferResponse.FromString(data)

    async def rest(self) -> list[pb.ModelStreamInferResponse]:
        """Half-closes and reads to the end."""
        await self.call.done_writing()
        messages = []
        while isinstance(data := await self.call.read(), bytes):
            messages.append(pb.ModelStreamInferResponse.FromString(data))
        return messages


@asynccontextmanager
async def open_edge(
    *cards: ModelCard,
    options: GrpcOptions | None = None,
    declared: tuple[ModelCard, ...] = (),
    max_stream_requests: int = 256,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    capacity: CapacityOptions | None = None,
    kserve: KserveServer | None = None,
    standby: StandbyModels | None = None,
    account: Account = ANONYMOUS,
) -> AsyncIterator[Edge]:
    """An edge whose instances 1, 2, … serve one card each; `edge.client.respond` says how they answer."""
    options = replace(options or GrpcOptions(), port=0, max_stream_requests=max_stream_requests)
    directory = FakeDirectory(*(instance(number, card) for number, card in enumerate(cards, 1)))
    client = FakeClient()

    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    settings = ServingOptions(models=declared)
    link = FakeLink()
    async with open_data_plane(
        *in_memory(directory, client, link), RoundRobin(), fake_texts(), metrics, settings, standby=standby
    ) as plane:
        readiness = Readiness()
        readiness.attach(plane)
        drain = StreamDrain()
        counted = Capacity(capacity)
        operations = [
            *KserveService(plane, readiness, drain, options, lambda: account, overload, counted, kserve).operations(),
            *HealthService(plane, readiness).operations(),
            *ReflectionService((SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES), drain).operations(),
        ]
        async with (
            serve_grpc(options, metered(bounded(operations, counted, overload), GrpcServerMetrics(registry))) as running,
            grpc.aio.insecure_channel(
                f"127.0.0.1:{running.port}",
                options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
            ) as channel,
        ):
            await asyncio.sleep(0)  # tokenizers load in the next turn
            yield Edge(plane, directory, client, readiness, drain, running, channel, registry, counted)


async def over(*streams: FakeStream) -> None:
    """Returns when these have been ended, by whomever."""
    while not all(stream.is_over for stream in streams):
        await asyncio.sleep(0.001)
