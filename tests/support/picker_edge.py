"""The endpoint picker on a real port, with the real data plane behind it, and a gateway that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec
from prometheus_client import CollectorRegistry

from dynamo.common.model_card import HttpEndpoint, ModelCard
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.api.picker.service import PICKER_SERVICE, RESETS_PER_S, PickerService
from dynamo.frontend.api.rpc.operation import Handler
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import (
    CapacityOptions,
    GrpcOptions,
    HttpOptions,
    OverloadStatus,
    PickerOptions,
    RouterMode,
    RouterOptions,
    ServingOptions,
    TextOptions,
)
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.port_metrics import PickerMetrics
from dynamo.frontend.preprocess.text_files import open_text_files
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import make_router
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.protos import ext_proc_pb2 as pb
from tests.support.fakes import FakeClient, FakeDirectory, in_memory, instance
from tests.support.http_edge import TextFiles, chat_card


def pod_card(number: int, name: str = "talker", **llm: Any) -> ModelCard:
    """A language model on a server that calls it `served`."""
    http = HttpEndpoint(address=f"10.0.0.{number}:8000", model="served")
    return msgspec.structs.replace(chat_card(name, **llm), http=http, aliases=(f"{name}-alias",))


class GatewayCall:
    """One call of a gateway to the picker."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self.call = call

    async def send(self, **parts: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**parts).SerializeToString())

    async def headers(
        self,
        path: str = "/v1/completions",
        method: str = "POST",
        *,
        ends: bool = False,
        subset: Iterable[str] | None = None,
        mode: pb.BodyMode.ValueType | None = None,
        back: pb.BodyMode.ValueType = pb.NONE,
        **headers: str,
    ) -> None:
        """Send the headers of a request; `ends`: there is no body. `mode` and `back`: how bodies are sent."""
        listed = {":method": method, ":path": path, ":authority": "models.example", "content-type": "application/json"}
        listed |= {name.replace("_", "-"): value for name, value in headers.items()}
        values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in listed.items()]
        message = pb.ProcessingRequest()
        message.request_headers.CopyFrom(pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=ends))
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": list(subset)})
        if mode is not None:
            message.protocol_config.request_body_mode = mode
            message.protocol_config.response_body_mode = back
        await self.call.write(message.SerializeToString())

    async def body(self, data: bytes, *, ends: bool = True) -> None:
        await self.send(request_body=pb.HttpBody(body=data, end_of_stream=ends))

    async def respond(self, status: int = 200, served: str = "", **headers: str) -> pb.ProcessingResponse:
        """Send the headers of the endpoint's response, and return what the picker says to them."""
        values = [pb.HeaderValue(key=":status", raw_value=str(status).encode())]
        values += [pb.HeaderValue(key=key.replace("_", "-"), raw_value=value.encode()) for key, value in headers.items()]
        message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values)))
        if served:
            message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
        await self.call.write(message.SerializeToString())
        return await self.read()

    async def read(self) -> pb.ProcessingResponse:
        data = await self.call.read()
        assert isinstance(data, bytes), "the picker has ended the call"
        return pb.ProcessingResponse.FromString(data)

    async def answer(self, body: bytes, path: str = "/v1/completions", **headers: Any) -> pb.ProcessingResponse:
        """Send a request and end the call. Return what the picker says to it, which may end the call before the body is sent."""
        await self.headers(path, **headers)
        reading = asyncio.create_task(self.read())
        with suppress(grpc.aio.AioRpcError):
            await self.body(body)
        answer = await reading
        with suppress(grpc.aio.AioRpcError):
            await self.ended()
        return answer

    async def ended(self) -> grpc.StatusCode:
        """Half-close the call, and return its status."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass
        return await self.call.code()


def headers_of(response: pb.ProcessingResponse) -> Mapping[str, str]:
    """Return the headers that a response sets."""
    kind = response.WhichOneof("response")
    part = response.immediate_response.headers if kind == "immediate_response" else None
    if part is None:
        part = getattr(response, kind or "").response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in part.set_headers}


@dataclass(frozen=True, slots=True)
class PickerEdge:
    plane: DataPlane
    directory: FakeDirectory
    client: FakeClient
    channel: grpc.aio.Channel
    loads: LoadTable
    registry: CollectorRegistry
    capacity: Capacity
    drain: StreamDrain
    handle: Handler
    """Serves one call, by its context."""

    def call(self) -> GatewayCall:
        return GatewayCall(self.channel.stream_stream(f"/{PICKER_SERVICE}/Process")())

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def open_picker_edge(
    *cards: ModelCard,
    guard: Guard | None = None,
    http: HttpOptions | None = None,
    capacity: CapacityOptions | None = None,
    router: RouterOptions | None = None,
    serving: ServingOptions | None = None,
    options: PickerOptions | None = None,
    body_s: float = 30.0,
) -> AsyncIterator[PickerEdge]:
    """A picker for instances 1, 2, … that serve one card each; without cards, two pods of one model."""
    served = cards or (pod_card(1), pod_card(2))
    directory = FakeDirectory(*(instance(number, card) for number, card in enumerate(served, 1)))
    client, loads, registry, counted = FakeClient(), LoadTable(), CollectorRegistry(), Capacity(capacity)
    metrics, drain = FrontendMetrics(registry), StreamDrain()
    picking = make_router(router or RouterOptions(mode=RouterMode.LEAST_LOADED), loads, lambda: 0.0)
    async with (
        open_text_files(TextFiles(), TextOptions()) as texts,
        open_data_plane(*in_memory(directory, client), picking, texts, metrics, serving) as plane,
    ):
        readiness = Readiness()
        readiness.attach(plane)
        settings = HttpSettings(options=http or HttpOptions(), overload=OverloadStatus.TOO_MANY_REQUESTS, capacity=counted)
        operations = protocol_operations(plane, readiness, TextOptions())
        service = PickerService(
            *(plane, operations, guard or Guard(None), settings, options or PickerOptions()),
            *(PickerMetrics(registry), metrics.refused, drain, body_s),
        )
        [operation] = service.operations()
        async with (
            serve_grpc(GrpcOptions(port=0), [operation], capacity=counted, resets_per_s=RESETS_PER_S) as running,
            grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        ):
            for card in served:
                if card.llm is not None:
                    await plane.text_model(ANONYMOUS, card.name)
            yield PickerEdge(plane, directory, client, channel, loads, registry, counted, drain, operation.handle)
