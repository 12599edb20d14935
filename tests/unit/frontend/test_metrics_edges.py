"""What protocol edges count: calls over gRPC on both servers, and requests that get no further than the edge."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.config import GrpcOptions, GrpcServerChoice, HttpOptions
from dynamo.frontend.metrics import FrontendMetrics, RouterMetrics
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.surfaces import Restriction, Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import SERVERS, Edge, open_edge
from tests.support.fakes import FakeStream, instance
from tests.support.http_edge import Speaker, chat_card, open_http_edge

CARD = ModelCard(
    name="m",
    kind=ModelKind.TENSOR,
    inputs=(TensorSpec(name="X", datatype="FP32", shape=(1,)),),
    outputs=(TensorSpec(name="X", datatype="FP32", shape=(1,)),),
)
UNARY = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "ModelInfer"}
BIDI = {"grpc_type": "bidi_stream", "grpc_service": SERVICE, "grpc_method": "ModelStreamInfer"}


def request(model: str = "m") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model, id="1")
    made.inputs.add(name="X", datatype="FP32", shape=[1])
    made.raw_input_contents.append(bytes(4))
    return made


def response(stream: FakeStream) -> None:
    stream.end(pb.ModelInferResponse(model_name="m", id="1").SerializeToString())


async def read(edge: Edge, name: str, value: float, **labels: str) -> None:
    """Returns once a sample has this value: a call is counted just after its client has heard of its end."""
    async with asyncio.timeout(5):
        while edge.registry.get_sample_value(name, labels) != value:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_unary_call_is_counted_with_its_status(server: GrpcServerChoice) -> None:
    async with open_edge(CARD, server=server) as edge:
        edge.client.respond = response
        await edge.infer(request())
        await read(edge, "grpc_server_handled_total", 1, **UNARY, grpc_code="OK")
        for name in ("started", "msg_received", "msg_sent"):
            await read(edge, f"grpc_server_{name}_total", 1, **UNARY)
        await read(edge, "grpc_server_handling_seconds_count", 1, **UNARY)
        with pytest.raises(grpc.aio.AioRpcError):
            await edge.call("ModelInfer", b"\xff\xff")
        await read(edge, "grpc_server_handled_total", 1, **UNARY, grpc_code="InvalidArgument")
        await read(edge, "grpc_server_msg_sent_total", 1, **UNARY)


@pytest.mark.parametrize("server", SERVERS)
async def test_the_messages_of_a_stream_are_counted(server: GrpcServerChoice) -> None:
    async with open_edge(CARD, server=server) as edge:
        edge.client.respond = response
        stream = edge.stream()
        await stream.send(request(), request(), request())
        await read(edge, "grpc_server_started_total", 1, **BIDI)
        assert len(await stream.rest()) == 3
        await read(edge, "grpc_server_handled_total", 1, **BIDI, grpc_code="OK")
        await read(edge, "grpc_server_msg_received_total", 3, **BIDI)
        await read(edge, "grpc_server_msg_sent_total", 3, **BIDI)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_call_that_its_client_cancels_is_counted_as_canceled(server: GrpcServerChoice) -> None:
    async with open_edge(CARD, server=server) as edge:
        requested = asyncio.Event()
        edge.client.respond = lambda stream: requested.set()
        call = edge.channel.unary_unary(f"/{SERVICE}/ModelInfer")(request().SerializeToString())
        await requested.wait()
        call.cancel()
        await read(edge, "grpc_server_handled_total", 1, **UNARY, grpc_code="Canceled")


async def test_what_is_refused_at_the_grpc_edge_counts_once_and_under_no_name_of_the_clients() -> None:
    async with open_edge(CARD) as edge:
        with pytest.raises(grpc.aio.AioRpcError):
            await edge.infer(request("made-up"))
        await read(edge, "dynamo_frontend_model_rejection_total", 1, model="unknown_model", reason="not_found")
        with pytest.raises(grpc.aio.AioRpcError):
            await edge.infer(pb.ModelInferRequest(model_name="m"))
        await read(edge, "dynamo_frontend_model_rejection_total", 1, model="m", reason="validation")
        stream = edge.stream()
        await stream.send(request("another"))
        await stream.rest()
        await read(edge, "dynamo_frontend_model_rejection_total", 2, model="unknown_model", reason="not_found")
        assert edge.registry.get_sample_value("dynamo_frontend_model_rejection_total", {"model": "made-up"}) is None


async def test_what_is_refused_at_the_http_edge_counts_by_its_reason() -> None:
    async with open_http_edge(chat_card(context_length=64), respond=Speaker(), http=HttpOptions(max_body_bytes=2048)) as edge:

        def refused(reason: str, model: str = "unknown_model") -> float | None:
            return edge.registry.get_sample_value("dynamo_frontend_model_rejection_total", {"model": model, "reason": reason})

        await edge.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert refused("validation") == 1
        await edge.post("/v1/completions", {"model": "talker", "prompt": "x" * 4000})
        assert refused("too_large") == 1
        await edge.post("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "Hi"}]})
        assert refused("not_found") == 1
        assert (await edge.post("/v1/completions", {"model": "talker", "prompt": "x" * 100})).status_code == 400
        assert (refused("validation"), refused("validation", "talker")) == (1, 1)
        await edge.http.get("/v1/models/nobody")
        assert refused("not_found") == 1
        labels = {"endpoint": "chat_completions", "request_type": "unary", "status": "error", "error_type": "not_found"}
        assert edge.registry.get_sample_value("dynamo_frontend_requests_total", {"model": "unknown_model", **labels}) == 1


def test_decisions_are_counted_with_what_they_found() -> None:
    registry = CollectorRegistry()
    router = MeasuredRouter(RoundRobin(), RouterMetrics(FrontendMetrics(registry)))
    there = [instance(1, chat_card(block_size=16)), instance(2, chat_card(block_size=16))]
    router.pick(RouteRequest(model="talker", prompt=bytes(4 * 64)), there)
    router.pick(RouteRequest(model="talker", pinned=there[1].id), there)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "talker", **labels})

    assert value("dynamo_frontend_router_decisions_total", reason="round-robin") == 1
    assert value("dynamo_frontend_router_decisions_total", reason="pinned") == 1
    assert value("dynamo_frontend_router_decision_seconds_count") == 2
    assert value("dynamo_frontend_router_overlap_blocks_count") == 1
    assert value("dynamo_component_router_kv_hit_rate_bucket", le="0.0") == 1


class _Refusing:
    """As much of a call's context as refusing it takes."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object) -> None:
        raise grpc.aio.AbortError(details)


async def test_a_call_that_may_not_come_in_is_counted() -> None:
    async def never(request: bytes, context: object) -> bytes:
        raise AssertionError("it came in")

    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    guard = Guard(None, restrictions=[Restriction(frozenset({Surface.INFERENCE}), "secret", "s")])
    services = {SERVICE: {"ModelInfer": grpc.unary_unary_rpc_method_handler(never)}}
    handler = guarded(services, guard, partial(metrics.refused, "tensor"))[SERVICE]["ModelInfer"]
    with pytest.raises(grpc.aio.AbortError):
        await handler.unary_unary(b"", _Refusing())  # type: ignore[attr-defined]
    labels = {"model": "unknown_model", "reason": "forbidden"}
    assert registry.get_sample_value("dynamo_frontend_model_rejection_total", labels) == 1


async def test_a_response_that_is_too_large_to_be_sent_leaves_its_request_counted_once() -> None:
    async with open_edge(CARD, options=GrpcOptions(max_message_bytes=4096)) as edge:
        edge.client.respond = lambda stream: stream.end(bytes(5000))
        with pytest.raises(grpc.aio.AioRpcError):
            await edge.infer(request())
        labels = {"endpoint": "tensor", "request_type": "unary"}
        await read(edge, "dynamo_frontend_requests_total", 1, model="m", **labels, status="success", error_type="")
        failed = {"model": "unknown_model", **labels, "status": "error", "error_type": "validation"}
        assert edge.registry.get_sample_value("dynamo_frontend_requests_total", failed) is None
