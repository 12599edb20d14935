"""What protocol edges count: requests that get no further than the edge. Calls over gRPC: `test_grpc_contract.py`."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.kv.events import KvUpdate
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.kv.tiers import TierChange
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.config import GrpcOptions, HttpOptions, KvRouterOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.router_metrics import RouterMetrics
from dynamo.frontend.security.surfaces import Restriction, Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import Edge, open_edge
from tests.support.fakes import FakeStream, instance
from tests.support.grpc_operations import unary
from tests.support.http_edge import Speaker, chat_card, open_http_edge

CARD = ModelCard(
    name="m",
    kind=ModelKind.TENSOR,
    inputs=(TensorSpec(name="X", datatype="FP32", shape=(1,)),),
    outputs=(TensorSpec(name="X", datatype="FP32", shape=(1,)),),
)


def request(model: str = "m") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model, id="1")
    made.inputs.add(name="X", datatype="FP32", shape=[1])
    made.raw_input_contents.append(bytes(4))
    return made


def response(stream: FakeStream) -> None:
    stream.end(pb.ModelInferResponse(model_name="m", id="1").SerializeToString())


async def read(edge: Edge, name: str, value: float, **labels: str) -> None:
    """Returns once a sample has this value: a call is counted just after its client has heard of its end."""
    async with asyncio.timeout(120):
        while edge.registry.get_sample_value(name, labels) != value:
            await asyncio.sleep(0.005)


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
        await edge.post("/v1/chat/completions", {"model": "missing", "messages": [{"role": "user", "content": "Hi"}]})
        assert refused("not_found") == 1
        assert (await edge.post("/v1/completions", {"model": "talker", "prompt": "x" * 100})).status_code == 400
        assert (refused("validation"), refused("validation", "talker")) == (1, 1)
        await edge.http.get("/v1/models/missing")
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


def test_blocks_are_counted_by_the_tier_that_routing_counted_on_and_by_what_was_found_there() -> None:
    registry, there = CollectorRegistry(), [instance(1, chat_card(block_size=16))]
    kv = KvRouter(KvRouterOptions(speculative_ttl_s=0.0))
    router = MeasuredRouter(kv, RouterMetrics(FrontendMetrics(registry)))
    prompt = bytes(4 * 16 * 20)
    hashes = pack_hashes(sequence_hashes(prompt, 16)[:15])
    before = RouteRequest(model="talker", prompt=prompt)
    router.found_cached(before, router.pick(before, there), 0)

    def value(name: str, tier: str) -> float | None:
        return registry.get_sample_value(f"dynamo_frontend_router_{name}", {"model": "talker", "tier": tier})

    assert value("tier_blocks_total", "none") is None, "models whose instances cache on GPUs only have no such metrics"
    kv.apply("talker", there[0].id, KvUpdate(0, hashes[:40], tiers=(TierChange("cpu", hashes),)))
    request = RouteRequest(model="talker", prompt=prompt)
    decision = router.pick(request, there)
    assert [value("tier_blocks_total", tier) for tier in ("gpu", "cpu", "none")] == [5, 10, 5]
    router.found_cached(request, decision, 16 * 11)
    assert [value("tier_found_ratio_sum", tier) for tier in ("gpu", "cpu")] == [1.0, 0.6]


def test_blocks_that_are_not_followed_are_counted_by_model() -> None:
    registry = CollectorRegistry()
    router = RouterMetrics(FrontendMetrics(registry))
    router.left_out("talker", 3)
    router.left_out("talker", 4)
    assert registry.get_sample_value("dynamo_frontend_router_left_out_blocks_total", {"model": "talker"}) == 7


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
    [operation] = guarded([unary(f"/{SERVICE}/ModelInfer", never)], guard, partial(metrics.refused, "tensor"))
    with pytest.raises(grpc.aio.AbortError):
        await operation.handle(b"", _Refusing())  # type: ignore[arg-type]
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
