"""The openai package against our server, and the smaller endpoints: embeddings, tokens, the description of them all."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from dynamo.common.errors import EngineError
from dynamo.common.generation import FinishReason
from dynamo.common.http.connection import HttpConnection
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.frontend.config import CapacityOptions, HttpOptions, TextLimits, TextOptions
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.support.fakes import FakeStream, tensor_card
from tests.support.http_edge import HttpEdge, Speaker, chat_card, open_http_edge, send_delta, tokens_of
from tests.support.memory import instances_of
from tests.support.parsers import brackets
from tests.support.waiting import until_free

USER: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def client(edge: HttpEdge) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0)


async def test_the_async_client_gets_responses_and_streams() -> None:
    async with open_http_edge(respond=Speaker()) as edge, client(edge) as ours:
        chat = await ours.chat.completions.create(model="talker", messages=USER)
        stream = await ours.chat.completions.create(
            model="talker", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        completion = await ours.completions.create(model="talker", prompt=["Once", "upon"], logprobs=0)
        models = [model.id async for model in ours.models.list()]
        model = await ours.models.retrieve("talker")
    assert chat.choices[0].message.content == "Hello you"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello you"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert [choice.text for choice in completion.choices] == ["Hello you"] * 2
    assert (models, model.id) == (["talker"], "talker")


async def test_the_blocking_client_gets_streams() -> None:
    async with open_http_edge(respond=Speaker()) as edge:

        def request() -> str:
            with OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as theirs:
                stream = theirs.completions.create(model="talker", prompt="Once", stream=True)
                return "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(request) == "Hello you"


class Place(BaseModel):
    city: str


async def test_the_client_parses_structured_responses() -> None:
    speaker = Speaker(('{"city":', '"Rome"}'))
    async with open_http_edge(respond=speaker) as edge, client(edge) as ours:
        completion = await ours.chat.completions.parse(model="talker", messages=USER, response_format=Place)
        response = await ours.responses.parse(model="talker", input="Hi", text_format=Place)
    assert completion.choices[0].message.parsed == response.output_parsed == Place(city="Rome")
    assert speaker.last.sampling.guided is not None


async def test_the_client_assembles_streamed_calls() -> None:
    parsers = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={})
    speaker = Speaker(("Well.", '[weather {"city":"Rome"}]'))
    async with (
        open_http_edge(chat_card(tool_parser="brackets"), respond=speaker, parsers=parsers) as edge,
        client(edge) as ours,
        ours.chat.completions.stream(model="talker", messages=USER, tools=[WEATHER]) as stream,
    ):
        completion = await stream.get_final_completion()
    [call] = completion.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Rome"}')
    assert completion.choices[0].finish_reason == "tool_calls"


async def test_the_client_sees_its_own_exceptions() -> None:
    def fail(stream: FakeStream) -> None:
        send_delta(stream, "Hel")
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail) as edge, client(edge) as ours:
        with pytest.raises(openai.NotFoundError) as missing:
            await ours.chat.completions.create(model="missing", messages=USER)
        with pytest.raises(openai.BadRequestError) as wrong:
            await ours.chat.completions.create(model="talker", messages=USER, temperature=3)
        stream = await ours.chat.completions.create(model="talker", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            async for _ in stream:
                pass
    assert missing.value.code == "model_not_found"
    assert wrong.value.param == "temperature"


async def test_small_writes_are_not_delayed_by_the_kernel() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        await edge.post("/v1/completions", {"model": "talker", "prompt": "x"})
        connections = [protocol.transport.get_extra_info("socket") for protocol in instances_of(HttpConnection)]
        delays = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in connections if one.fileno() >= 0]
    assert delays
    assert all(delays)


# Embeddings


def embedding_card(datatype: str = "FP32", shape: tuple[int, ...] = (-1,)) -> ModelCard:
    return ModelCard(
        name="embedder",
        kind=ModelKind.EMBEDDING,
        inputs=(TensorSpec(name="text", datatype="BYTES", shape=shape),),
        outputs=(
            TensorSpec(name="vector", datatype=datatype, shape=(-1, 4)),
            TensorSpec(name="prompt_tokens", datatype="INT32", shape=(-1,)),
        ),
    )


def embed(datatype: str = "FP32") -> Callable[[FakeStream], None]:
    """The vector of a text is its length, and a few more numbers."""

    def respond(stream: FakeStream) -> None:
        request = ModelInferRequest.FromString(stream.body)
        [raw] = request.raw_input_contents
        texts = decode_bytes(raw, request.inputs[0].shape[0])
        tensors = ModelInferResponse()
        kind = np.float64 if datatype == "FP64" else np.float32
        vectors = np.array([[len(text), 2, 2, 1] for text in texts], kind)
        tensors.outputs.add(name="vector", datatype=datatype, shape=vectors.shape)
        tensors.outputs.add(name="prompt_tokens", datatype="INT32", shape=[len(texts)])
        tensors.raw_output_contents.extend([vectors.tobytes(), np.array([len(text) for text in texts], np.int32).tobytes()])
        stream.end(tensors.SerializeToString())

    return respond


@pytest.mark.parametrize(("datatype", "shape"), [("FP32", (-1,)), ("FP64", (-1, 1))])
async def test_texts_become_vectors(datatype: str, shape: tuple[int, ...]) -> None:
    async with open_http_edge(embedding_card(datatype, shape), respond=embed(datatype)) as edge, client(edge) as ours:
        binary = await ours.embeddings.create(model="embedder", input=["a", "bcd"])  # the client asks for base64
        plain = await ours.embeddings.create(model="embedder", input="bcd", encoding_format="float")
        raw = (await edge.post("/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "base64"})).json()
    assert [item.embedding for item in binary.data] == [[1, 2, 2, 1], [3, 2, 2, 1]]
    assert plain.data[0].embedding == [3, 2, 2, 1]
    assert (binary.usage.prompt_tokens, binary.usage.total_tokens) == (4, 4)
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == [1, 2, 2, 1]


def token_card(longest: int = -1) -> ModelCard:
    return msgspec.structs.replace(
        embedding_card(),
        inputs=(
            TensorSpec(name="text", datatype="BYTES", shape=(-1,), optional=True),
            TensorSpec(name="token_ids", datatype="INT32", shape=(-1, longest), optional=True),
        ),
    )


async def test_token_ids_are_embedded_by_models_that_take_them() -> None:
    received: list[ModelInferRequest] = []

    def respond(stream: FakeStream) -> None:
        received.append(request := ModelInferRequest.FromString(stream.body))
        response = ModelInferResponse()
        response.outputs.add(name="vector", datatype="FP32", shape=[request.inputs[0].shape[0], 1])
        response.raw_output_contents.append(np.ones(request.inputs[0].shape[0], np.float32).tobytes())
        stream.end(response.SerializeToString())

    async with open_http_edge(token_card(), respond=respond) as edge:
        for given in ([5, 6], [[5, 6], [7]], "text"):
            assert (await edge.post("/v1/embeddings", {"model": "embedder", "input": given})).status_code == 200
    shapes = [(request.inputs[0].name, list(request.inputs[0].shape)) for request in received]
    assert shapes == [("token_ids", [1, 2]), ("token_ids", [2, 2]), ("text", [1])]
    assert np.frombuffer(received[1].raw_input_contents[0], np.int32).tolist() == [5, 6, 7, -1]


async def test_many_token_ids_are_padded_in_steps_and_held_with_their_padding() -> None:
    received: list[list[int]] = []
    held: list[int] = []

    def respond(stream: FakeStream) -> None:
        held.append(edge.capacity.buffered_bytes)
        request = ModelInferRequest.FromString(stream.body)
        received.append(np.frombuffer(request.raw_input_contents[0], np.int32).reshape(request.inputs[0].shape).sum(1).tolist())
        stream.end(ModelInferResponse().SerializeToString())

    async with open_http_edge(token_card(), respond=respond) as edge:
        await edge.post("/v1/embeddings", {"model": "embedder", "input": [[1] * 40_000] + [[2]] * 99})
    assert received == [[40_000] + [2 - 39_999] * 99]
    assert held[0] > 100 * 40_000 * 4


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_padding_that_is_larger_than_a_body_or_than_the_capacity_is_never_made(path: str) -> None:
    bomb = {"model": "embedder", "input": [[1] * 60_000] + [[1]] * 2047}
    for http, capacity, status, words in (
        (HttpOptions(), CapacityOptions(), 413, "at most 67108864 are allowed"),
        (HttpOptions(max_body_bytes=2**30), CapacityOptions(max_buffered_bytes=100 * 2**20), 503, "near its limit"),
    ):
        async with open_http_edge(token_card(), http=http, capacity=capacity) as edge:
            response = await edge.post(path, bomb)
            assert (response.status_code, words in response.text) == (status, True), response.text
            assert not edge.client.streams
            await until_free(edge.capacity)


async def test_a_text_with_more_tokens_than_the_model_takes_is_rejected_before_it_is_padded() -> None:
    async with open_http_edge(token_card(longest=4)) as edge:
        error = await edge.error("/v1/embeddings", {"model": "embedder", "input": [[1] * 5, [1]]})
    assert (error["param"], error["message"]) == ("input", "a text has 5 tokens; the model takes 4")


async def test_vectors_can_be_shortened() -> None:
    async with open_http_edge(embedding_card(), respond=embed()) as edge:
        http_response = await edge.post("/v1/embeddings", {"model": "embedder", "input": "a", "dimensions": 3})
        error = await edge.error("/v1/embeddings", {"model": "embedder", "input": "a", "dimensions": 5})
    assert http_response.json()["data"][0]["embedding"] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert error["param"] == "dimensions"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": ["a"] * 4}, "input"),
        ({"model": "adder"}, "model"),
        ({"model": "talker"}, "model"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_input_that_cannot_be_embedded_is_rejected(wrong: dict[str, Any], param: str) -> None:
    cards = (embedding_card(), chat_card(), tensor_card())
    async with open_http_edge(*cards, respond=embed(), text=TextOptions(limits=TextLimits(max_embedding_inputs=3))) as edge:
        error = await edge.error("/v1/embeddings", {"model": "embedder", "input": "a"} | wrong)
    assert error["param"] == param


async def test_an_invalid_response_of_an_embedding_model_is_an_internal_error() -> None:
    def nonsense(stream: FakeStream) -> None:
        tensors = ModelInferResponse()
        tensors.outputs.add(name="vector", datatype="FP32", shape=[1, 3])
        tensors.raw_output_contents.append(b"\0" * 4)
        stream.end(tensors.SerializeToString())

    async with open_http_edge(embedding_card(), respond=nonsense) as edge:
        error = await edge.error("/v1/embeddings", {"model": "embedder", "input": "a"}, 500)
    assert error["code"] == "internal_error"


# Tokens


async def test_text_is_tokenized_and_detokenized() -> None:
    async with open_http_edge() as edge:
        there = (await edge.post("/tokenize", {"model": "talker", "prompt": "né", "return_token_strs": True})).json()
        back = (await edge.post("/detokenize", {"model": "talker", "tokens": there["tokens"]})).json()
        chat = (await edge.post("/v1/tokenize", {"model": "talker", "messages": USER})).json()
    assert there == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": list(tokens_of("né")),
        "token_strs": ["n", "Ã", "©"],
    }
    assert back == {"prompt": "né"}
    assert chat["tokens"] == list(tokens_of("<user>Hi\n<assistant>"))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"model": "talker"}, 400),
        ("/tokenize", {"model": "talker", "prompt": "a", "messages": USER}, 400),
        ("/tokenize", {"model": "missing", "prompt": "a"}, 404),
        ("/detokenize", {"model": "talker", "tokens": [99999]}, 400),
        ("/detokenize", {"model": "talker", "tokens": [-1]}, 400),
    ],
)
async def test_invalid_tokens_are_rejected(path: str, body: dict[str, Any], status: int) -> None:
    async with open_http_edge() as edge:
        await edge.error(path, body, status)


async def test_a_token_outside_the_vocabulary_is_named_with_its_field() -> None:
    async with open_http_edge() as edge:
        errors = [
            await edge.error("/detokenize", {"model": "talker", "tokens": [99999]}),
            await edge.error("/v1/completions", {"model": "talker", "prompt": [99999]}),
        ]
    assert [error["param"] for error in errors] == ["tokens", "prompt"]
    assert errors[0]["message"].startswith("'tokens' has the token id 99999, which is out of vocabulary: the model has ")


async def test_long_texts_are_tokenized_and_detokenized_as_short_ones_are() -> None:
    text = "né " * 5000
    async with open_http_edge() as edge:
        tokenized = (await edge.post("/tokenize", {"model": "talker", "prompt": text, "return_token_strs": True})).json()
        back = (await edge.post("/detokenize", {"model": "talker", "tokens": tokenized["tokens"]})).json()
    assert tokenized["tokens"] == list(tokens_of(text))
    assert len(tokenized["token_strs"]) == tokenized["count"]
    assert back == {"prompt": text}


async def test_more_tokens_than_a_response_may_hold_are_rejected() -> None:
    async with open_http_edge() as edge:
        error = await edge.error("/tokenize", {"model": "talker", "prompt": "a" * (2**20 + 1)})
    assert error["message"] == "the prompt has 1048577 tokens; at most 1048576 are allowed"


# The description


async def test_the_openapi_document_covers_every_request_and_has_no_dangling_reference() -> None:
    async with open_http_edge() as edge:
        document = (await edge.http.get("/openapi.json")).json()
        page = await edge.http.get("/docs")
    request = document["components"]["schemas"]["ChatRequest"]
    assert request["required"] == ["messages"]
    assert request["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    text = msgspec.json.encode(document).decode()
    for reference in {part.split('"')[0] for part in text.split('"$ref":"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]
    assert page.headers["content-type"].startswith("text/html")
    assert "https://" not in page.text
    assert "http://" not in page.text


async def test_finish_reasons_are_those_of_openai() -> None:
    async with open_http_edge(respond=Speaker(reason=FinishReason.CONTENT_FILTER)) as edge, client(edge) as ours:
        completion = await ours.chat.completions.create(model="talker", messages=USER)
    assert completion.choices[0].finish_reason == "content_filter"
