"""ModelStreamInfer over a real port."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, FinishReason, Summary, delta_encoder, summary_encoder
from dynamo.common.tensors.relay import RelayedRequest, to_tensors
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.derived_accounts import SameAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import Edge, open_edge
from tests.support.fakes import FakeStream, TokenEngine, llm_card, relay_card, tensor_card


def tensor_request(id_: str, model: str = "adder", **parameters: bool) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="x", datatype="INT32", shape=[1])
    request.raw_input_contents.append(b"\1\0\0\0")
    for name, value in parameters.items():
        request.parameters[name].bool_param = value
    return request


def text_request(id_: str, *prompts: str, stream: bool = True, max_tokens: int = 4, n: int = 1) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="talker", id=id_)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    tensor.contents.bytes_contents.extend(prompt.encode() for prompt in prompts)
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
    request.parameters["max_tokens"].int64_param = max_tokens
    if n > 1:
        request.parameters["n"].int64_param = n
    return request


def tensor_response(stream: FakeStream, value: bytes = b"\1\0\0\0") -> bytes:
    request = pb.ModelInferRequest.FromString(stream.body)
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name="y", datatype="INT32", shape=[1])
    response.raw_output_contents.append(value)
    return response.SerializeToString()


def respond_at_once(stream: FakeStream) -> None:
    stream.end(tensor_response(stream))


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def ids(responses: list[pb.ModelStreamInferResponse]) -> list[str]:
    return [response.infer_response.id for response in responses]


def texts(response: pb.ModelStreamInferResponse) -> list[str]:
    raws = response.infer_response.raw_output_contents
    return [text.decode() for text in decode_bytes(raws[0], response.infer_response.outputs[0].shape[0])]


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    cards = (tensor_card(), llm_card(), tensor_card("repeater", decoupled=True))
    async with open_edge(*cards, max_stream_requests=4) as edge:
        yield edge


class OfSomeModels(SameAccount):
    """Account for some models only."""

    @property
    def models(self) -> tuple[str, ...]:
        return ("whisper",)


@pytest.mark.parametrize("account", [OfSomeModels(ANONYMOUS), KeyAccount(ApiKey(name="team", salt=b"", digest=b""))])
async def test_a_key_uses_a_relay_over_the_api_that_reads_its_bodies(account: Account) -> None:
    """The body in the tensors may name another model of the same server, or talk without being charged."""
    body = RelayedRequest("/v1/audio/speech", "application/json", b'{"model": "other"}')
    request = pb.ModelInferRequest.FromString(to_tensors(body, "whisper").raw)
    async with open_edge(relay_card(), account=account) as edge:
        stream = edge.stream()
        await stream.send(request)
        [refused] = await stream.rest()
        assert "over OpenAI's API, not over KServe" in refused.error_message and edge.client.streams == []


async def test_tensor_responses_keep_the_order_of_their_requests(edge: Edge) -> None:
    stream = edge.stream()
    await stream.send(tensor_request("a"), tensor_request("b"), tensor_request("c"))
    await edge.client.opened_streams(3)
    for waiting in reversed(edge.client.streams):
        respond_at_once(waiting)
    assert ids(await stream.rest()) == ["a", "b", "c"]


async def test_an_unforeseen_exception_is_an_internal_error_in_band(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    def broken(stream: FakeStream) -> None:
        raise RuntimeError("secret")

    edge.client.respond = broken
    stream = edge.stream()
    await stream.send(tensor_request("a"))
    assert (await stream.read()).error_message == "internal error"
    edge.client.respond = respond_at_once
    await stream.send(tensor_request("b"))
    assert ids([await stream.read()]) == ["b"]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


async def test_decoupled_responses_are_marked_as_final_or_not(edge: Edge) -> None:
    def three_times(stream: FakeStream) -> None:
        stream.data(tensor_response(stream), tensor_response(stream))
        stream.data(tensor_response(stream))
        stream.end()

    edge.client.respond = three_times
    stream = edge.stream()
    await stream.send(tensor_request("plain", "repeater"))
    plain = [await stream.read() for _ in range(3)]
    assert [is_final(response) for response in plain] == [False, False, False]
    await stream.send(tensor_request("told", "repeater", triton_enable_empty_final_response=True))
    received = await stream.rest()
    assert [is_final(response) for response in received] == [False, False, False, True]
    last = received[-1].infer_response
    assert (last.id, last.model_name, len(last.outputs)) == ("told", "repeater", 0)


@pytest.mark.parametrize("wants_empty", [False, True])
async def test_a_response_that_says_that_it_is_the_last_is_followed_by_no_empty_one(edge: Edge, wants_empty: bool) -> None:
    last = pb.ModelInferResponse(parameters={"triton_final_response": pb.InferParameter(bool_param=True)}).SerializeToString()

    def twice(stream: FakeStream) -> None:
        stream.data(tensor_response(stream), tensor_response(stream) + last)
        stream.end()

    edge.client.respond = twice
    stream = edge.stream()
    await stream.send(tensor_request("a", "repeater", triton_enable_empty_final_response=wants_empty))
    assert [is_final(response) for response in await stream.rest()] == [False, True]


async def test_a_decoupled_model_may_send_no_response(edge: Edge) -> None:
    edge.client.respond = lambda stream: stream.end()
    stream = edge.stream()
    await stream.send(tensor_request("a", "repeater"), tensor_request("b", "repeater", triton_enable_empty_final_response=True))
    assert ids(await stream.rest()) == ["b"]


async def test_a_slow_decoupled_request_does_not_delay_others(edge: Edge) -> None:
    stream = edge.stream()
    await stream.send(tensor_request("slow", "repeater"))
    await edge.client.opened_streams(1)
    edge.client.respond = respond_at_once
    await stream.send(tensor_request("quick"))
    assert ids([await stream.read()]) == ["quick"]
    edge.client.streams[0].end()
    assert await stream.rest() == []


async def test_text_streams_with_the_last_message_marked(edge: Edge) -> None:
    edge.client.respond = TokenEngine([], EngineError)  # type: ignore[arg-type]
    stream = edge.stream()
    await stream.send(text_request("t", "abc"))
    responses = await stream.rest()
    assert len("".join(text for response in responses for text in texts(response)).split()) == 4
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    assert decode_bytes(responses[-1].infer_response.raw_output_contents[1], 1) == [b"length"]
    assert {response.infer_response.id for response in responses} == {"t"}


async def test_each_token_is_sent_at_once_and_pending_ones_share_a_message(edge: Edge) -> None:
    stream = edge.stream()
    await stream.send(text_request("t", "a"))
    engine = await edge.client.next_stream()
    engine.data(delta_encoder.encode(Delta((1,))))
    assert texts(await stream.read()) == ["1 "]
    engine.data(delta_encoder.encode(Delta((2,))), delta_encoder.encode(Delta((3,))))
    engine.data(delta_encoder.encode(Delta((4,), finish_reason=FinishReason.LENGTH)))
    engine.end(summary_encoder.encode(Summary()))
    assert [texts(response) for response in await stream.rest()] == [["2 3 4 "]]


async def test_text_that_shall_not_stream_comes_as_one_message(edge: Edge) -> None:
    edge.client.respond = TokenEngine([], EngineError)  # type: ignore[arg-type]
    stream = edge.stream()
    await stream.send(text_request("t", "abc", "d", stream=False))
    (response,) = await stream.rest()
    assert [len(text.split()) for text in texts(response)] == [4, 4]
    assert is_final(response)


async def test_several_prompts_and_choices_stream_side_by_side(edge: Edge) -> None:
    def two_choices(stream: FakeStream) -> None:
        for index in (1, 0):
            stream.data(delta_encoder.encode(Delta((index + 5,), index, FinishReason.STOP)))
        stream.end(summary_encoder.encode(Summary()))

    edge.client.respond = two_choices
    stream = edge.stream()
    await stream.send(text_request("t", "a", "b", n=2))
    responses = await stream.rest()
    said = ["".join(column) for column in zip(*(texts(response) for response in responses), strict=True)]
    assert said == ["5 ", "6 ", "5 ", "6 "]
    assert [is_final(response) for response in responses] == [False, True]


async def test_requests_above_the_bound_wait_for_earlier_ones(edge: Edge) -> None:
    stream = edge.stream()
    await stream.send(*(tensor_request(str(number)) for number in range(6)))
    await edge.client.opened_streams(4)
    edge.client.streams[0].end(tensor_response(edge.client.streams[0]))
    assert (await stream.read()).infer_response.id == "0"
    await edge.client.opened_streams(5)
    assert len(edge.client.streams) == 5
    edge.client.respond = respond_at_once
    for waiting in edge.client.streams[1:5]:
        respond_at_once(waiting)
    assert ids(await stream.rest()) == ["1", "2", "3", "4", "5"]


async def test_a_response_above_the_limit_fails_only_its_request(edge: Edge) -> None:
    edge.client.respond = lambda stream: stream.end(bytes(65 * 2**20))
    stream = edge.stream()
    await stream.send(tensor_request("big"))
    response = await stream.read()
    assert "messages are limited to 67108864" in response.error_message
    edge.client.respond = respond_at_once
    await stream.send(tensor_request("small"))
    assert ids(await stream.rest()) == ["small"]
