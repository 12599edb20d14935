"""Requests that a gateway carries, as the data plane sees them."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, delta_decoder, request_encoder
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.serving.carried import CarriedRequest
from tests.support.fakes import instance
from tests.support.http_edge import chat_card
from tests.support.picker_edge import pod_card

PODS = tuple(instance(number, pod_card(number)) for number in (1, 2, 3))


def carried(endpoints: set[str] | None = None) -> tuple[CarriedRequest, list[Instance]]:
    placed: list[Instance] = []
    return CarriedRequest(endpoints, lambda request, decision, candidates: placed.append(decision.instance)), placed


def test_instances_with_an_address_are_reached_and_a_subset_may_have_ports() -> None:
    assert carried()[0].reached_of(PODS) is PODS
    assert carried()[0].reached_of((*PODS, instance(4, chat_card()))) == PODS
    assert carried({"10.0.0.1:8000", "10.0.0.3"})[0].reached_of(PODS) == (PODS[0], PODS[2])
    assert carried({"10.0.0.1:9000"})[0].reached_of(PODS) == carried(set())[0].reached_of(PODS) == ()


async def test_all_prompts_of_a_request_go_where_the_first_one_went() -> None:
    request, placed = carried()
    body = request_encoder.encode(GenerateRequest(model="talker", prompt=b"", n=2))
    streams = [
        request.place(RouteRequest("talker"), RoutingDecision(PODS[1], "turn"), PODS, "generate", body),
        request.place(RouteRequest("talker"), RoutingDecision(PODS[1], "turn"), PODS, "generate", body),
    ]
    assert placed == [PODS[1]] and request.reached_of(PODS) == (PODS[1],)
    reading = asyncio.gather(*(stream.read() for stream in streams))
    request.begin()
    assert [[delta_decoder.decode(each) for each in part] for part in await reading] == [[Delta()], [Delta()]]
    request.end()
    for stream in streams:
        last = [delta_decoder.decode(each) for each in await stream.read()]
        assert last == [Delta((), 0, FinishReason.STOP), Delta((), 1, FinishReason.STOP)]
        assert await stream.read() == []


async def test_a_failure_is_raised_wherever_the_response_was() -> None:
    request, _ = carried()
    stream = request.place(RouteRequest("adder"), RoutingDecision(PODS[0], "turn"), PODS, "infer", b"tensors")
    request.end(EngineError("the endpoint responded with status 500"))
    request.end()  # too late
    with pytest.raises(EngineError, match="status 500"):
        await stream.result()
    assert stream.started, "so that the request is not repeated"
