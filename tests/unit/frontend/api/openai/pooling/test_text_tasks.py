"""Rerank, score, classify and pooling: which models they use, and the forms of their responses."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.frontend.config import CapacityOptions, HttpOptions, TextLimits, TextOptions
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.support.fakes import FakeStream, tensor_card
from tests.support.http_edge import chat_card, open_http_edge
from tests.support.waiting import until_free

TEXT = TensorSpec(name="text", datatype="BYTES", shape=(-1,))
PAIR = TensorSpec(name="text_pair", datatype="BYTES", shape=(-1,))


def card(name: str, *inputs: TensorSpec, columns: int = 1, labels: tuple[str, ...] = ()) -> ModelCard:
    output = TensorSpec(name="numbers", datatype="FP32", shape=(-1, columns), labels=labels)
    tokens = TensorSpec(name="prompt_tokens", datatype="INT32", shape=(-1,))
    return ModelCard(name=name, kind=ModelKind.TENSOR, inputs=inputs, outputs=(output, tokens))


JUDGE = card("judge", TEXT, PAIR)
EMBEDDER = card("embedder", TEXT, columns=2)
MOODS = card("moods", TEXT, columns=2, labels=("bad", "good"))


def numbers(compute: Callable[..., list[float]]) -> Callable[[FakeStream], None]:
    """A model that computes a row of each text or pair, and counts characters as tokens."""

    def respond(stream: FakeStream) -> None:
        request = ModelInferRequest.FromString(stream.body)
        columns = [
            [text.decode() for text in decode_bytes(raw, tensor.shape[0])]
            for raw, tensor in zip(request.raw_input_contents, request.inputs, strict=True)
        ]
        rows = np.array([compute(*texts) for texts in zip(*columns, strict=True)], np.float32)
        lengths = np.array([sum(map(len, texts)) for texts in zip(*columns, strict=True)], np.int32)
        response = ModelInferResponse()
        response.outputs.add(name="numbers", datatype="FP32", shape=rows.shape)
        response.outputs.add(name="prompt_tokens", datatype="INT32", shape=lengths.shape)
        response.raw_output_contents.extend([rows.tobytes(), lengths.tobytes()])
        stream.end(response.SerializeToString())

    return respond


def common(first: str, second: str) -> list[float]:
    return [float(len(set(first) & set(second)))]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_sorted_by_a_cross_encoder(path: str) -> None:
    async with open_http_edge(JUDGE, respond=numbers(common)) as edge:
        body = {"model": "judge", "query": "abc", "documents": ["xyz", {"text": "abc"}, "abz"]}
        ranked = (await edge.post(path, body)).json()
        short = (await edge.post(path, {**body, "top_n": 1, "return_documents": False})).json()
    assert [(result["index"], result["relevance_score"]) for result in ranked["results"]] == [(1, 3), (2, 2), (0, 0)]
    assert ranked["results"][0]["document"] == {"text": "abc"}
    assert ranked["usage"] == {"prompt_tokens": 18, "total_tokens": 18}
    assert short["results"] == [{"index": 1, "relevance_score": 3}]


async def test_a_query_is_held_once_for_each_document_before_it_is_repeated() -> None:
    held: list[int] = []

    def respond(stream: FakeStream) -> None:
        held.append(edge.capacity.buffered_bytes)
        numbers(common)(stream)

    body = {"model": "judge", "query": "ab" * 10_000, "documents": ["abc", "xyz"] * 250}
    async with open_http_edge(JUDGE, respond=respond) as edge:
        ranked = (await edge.post("/v1/rerank", body)).json()
    assert {result["relevance_score"] for result in ranked["results"]} == {2, 0}
    assert held[0] > 500 * 20_000


async def test_a_query_that_is_too_large_with_all_documents_is_never_repeated() -> None:
    body = {"model": "judge", "query": "a" * 20_000, "documents": ["b"] * 500}
    for http, capacity, status, words in (
        (HttpOptions(max_body_bytes=5_000_000), CapacityOptions(), 413, "at most 5000000 are allowed"),
        (HttpOptions(), CapacityOptions(max_buffered_bytes=5_000_000), 503, "near its limit"),
    ):
        async with open_http_edge(JUDGE, http=http, capacity=capacity) as edge:
            response = await edge.post("/v1/rerank", body)
            assert (response.status_code, words in response.text) == (status, True), response.text
            assert not edge.client.streams
            await until_free(edge.capacity)


async def test_an_embedding_model_compares_by_the_cosine() -> None:
    async with open_http_edge(EMBEDDER, respond=numbers(lambda text: [text.count("a"), text.count("b")])) as edge:
        scored = (await edge.post("/v1/score", {"model": "embedder", "text_1": "a", "text_2": ["aaa", "b", "ab"]})).json()
    assert scored["object"] == "list"
    assert [item["score"] for item in scored["data"]] == pytest.approx([1, 0, 0.5**0.5])


async def test_pairs_are_scored_one_by_one() -> None:
    async with open_http_edge(JUDGE, respond=numbers(common)) as edge:
        body = {"model": "judge", "text_1": ["ab", "cd"], "text_2": ["abc", "abc"]}
        assert [item["score"] for item in (await edge.post("/score", body)).json()["data"]] == [2, 1]


async def test_classes_have_the_models_labels() -> None:
    async with open_http_edge(MOODS, respond=numbers(lambda text: [0.25, 0.75] if "!" in text else [1, 0])) as edge:
        data = (await edge.post("/v1/classify", {"input": ["hi!", "hm"]})).json()["data"]
    assert [(item["label"], item["probs"], item["num_classes"]) for item in data] == [
        ("good", [0.25, 0.75], 2),
        ("bad", [1, 0], 2),
    ]


async def test_pooling_returns_the_rows() -> None:
    async with open_http_edge(EMBEDDER, respond=numbers(lambda text: [1, len(text)])) as edge:
        plain = (await edge.post("/pooling", {"model": "embedder", "input": "abc"})).json()
        packed = (await edge.post("/pooling", {"model": "embedder", "input": ["abc"], "encoding_format": "base64"})).json()
    assert plain["data"] == [{"index": 0, "data": [1, 3], "object": "pooling"}]
    assert np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4").tolist() == [1, 3]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"model": "adder", "query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"model": "talker", "query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 5}),
        ("/v1/rerank", {"query": "a" * 60, "documents": ["b"] * 2}),
        ("/v1/score", {"text_1": "a", "text_2": []}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/v1/classify", {"model": "judge", "input": "a"}),
        ("/pooling", {"model": "judge", "input": "a"}),
    ],
)
async def test_what_no_model_can_do_is_rejected(path: str, body: dict[str, Any]) -> None:
    limits = TextOptions(limits=TextLimits(max_embedding_inputs=4, max_prompt_chars=100))
    async with open_http_edge(JUDGE, chat_card(), tensor_card(), respond=numbers(common), text=limits) as edge:
        assert (await edge.post(path, body)).status_code == 400


@pytest.mark.parametrize(
    ("model", "body", "path"),
    [
        ("judge", {"query": "abc", "documents": ["xab", "b"]}, "/v1/rerank"),
        ("judge", {"text_1": "abc", "text_2": ["xab"]}, "/v1/score"),
        ("embedder", {"input": "abc"}, "/v1/embeddings"),
        ("moods", {"input": ["abc"]}, "/v1/classify"),
    ],
)
async def test_an_invocation_is_served_by_the_endpoint_that_its_fields_name(model: str, body: dict[str, Any], path: str) -> None:
    compute = common if model == "judge" else lambda text: [0.25, 0.75]
    async with open_http_edge(JUDGE, EMBEDDER, MOODS, respond=numbers(compute)) as edge:
        invoked, direct = [await edge.post(each, {"model": model, **body}) for each in ("/invocations", path)]
    assert invoked.status_code == 200
    named = ("id", "created")
    assert [{k: v for k, v in response.json().items() if k not in named} for response in (invoked, direct)] == [
        {k: v for k, v in direct.json().items() if k not in named}
    ] * 2
