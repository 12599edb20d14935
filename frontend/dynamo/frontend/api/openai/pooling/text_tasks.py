"""Rerank, score, classify and pooling: numbers for texts, by tensor models.

| task | model |
|---|---|
| rerank, score | a cross-encoder; or an embedding model, by the cosine of its vectors |
| classify | a BYTES input, and a floating-point output with `labels` and a column for each |
| pooling | an embedding model |

A cross-encoder has two BYTES inputs `text` and `text_pair` of shape [-1], and a floating-point output with a number for each
pair. An integer output named `prompt_tokens` may report how many tokens each text, or pair, had.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import FLOATS, Buffer, encode_bytes
from dynamo.frontend.api.declaration import Reads
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.pooling.embeddings import embeds_texts, expected_tokens, to_tensors
from dynamo.frontend.api.openai.pooling.text_task_objects import (
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    Document,
    Pooled,
    PoolingRequest,
    PoolingResponse,
    Reranked,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
    TaskRequest,
)
from dynamo.frontend.api.openai.pooling.text_tensors import pairs_head, repeated_query
from dynamo.frontend.api.openai.pooling.vectors import Vectors, from_tensors, rows_to_json, with_rows
from dynamo.frontend.api.openai.response_objects import EmbeddingUsage
from dynamo.frontend.api.openai.to_text import prompts_of
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.rules import check_chars
from dynamo.frontend.config import TextLimits
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel

R = TypeVar("R", bound=TaskRequest)

FIRST_INPUT, SECOND_INPUT = _PAIR = ("text", "text_pair")


@dataclass(slots=True)
class Numbers:
    """The model that serves one request: texts to rows of numbers."""

    card: ModelCard
    name: str
    limits: TextLimits
    infer: Callable[[TensorRequest, int], Awaitable[Buffer]]
    """Returns the response to a request of about so many tokens."""
    run: Callable[[Work[Any]], Awaitable[Any]]
    """Returns the result of what may take long."""
    max_bytes: int
    """The most that the tensors of one request may take."""
    tokens: int = 0
    """Tokens of all texts so far, as the model counts them."""

    async def rows(self, texts: Sequence[str | list[int]]) -> Vectors:
        """Return a row for each text."""
        self._check(texts)
        request: TensorRequest = await self.run(to_tensors(texts, self.name, self.card, self.max_bytes))
        return await self._run(request, texts, len(texts))

    async def scores(self, queries: Sequence[str], documents: Sequence[str]) -> list[float]:
        """Return how well each document matches the query at its place; one query stands for all documents."""
        if scores_pairs(self.card):
            firsts = [*queries] * len(documents) if len(queries) == 1 else queries
            self._check(documents, firsts)
            if len(queries) == 1:
                building = repeated_query(queries[0], documents, _PAIR, self.name, self.max_bytes)
                request: TensorRequest = await self.run(building)
            else:
                head = pairs_head(self.name, _PAIR, len(documents))
                request = TensorRequest.build(head, [encode_bytes(queries), encode_bytes(documents)])
            column = (await self._run(request, (*firsts, *documents), len(documents)))[:, 0]
            return [float(score) for score in column]
        vectors = await self.rows((*queries, *documents))
        scores: list[float] = await self.run(_cosines(vectors[: len(queries)], vectors[len(queries) :]))
        return scores

    async def _run(self, request: TensorRequest, texts: Sequence[str | list[int]], count: int) -> Vectors:
        vectors: Vectors
        vectors, tokens = await self.run(from_tensors(await self.infer(request, expected_tokens(texts)), count))
        self.tokens += tokens
        return vectors

    def _check(self, texts: Sequence[str | list[int]], others: Sequence[str] = ()) -> None:
        """Raises InvalidRequest for no text, or too many, or texts that are too long together with `others`."""
        if not texts:
            raise InvalidRequest("there is no text")
        most = self.limits.max_embedding_inputs
        if len(texts) > most:
            raise InvalidRequest(f"got {len(texts)} texts; at most {most} are allowed")
        if not (all(texts) and all(others)):
            raise InvalidRequest("a text is empty")
        check_chars(sum(map(len, texts)) + sum(map(len, others)), self.limits, "input")

    @property
    def usage(self) -> EmbeddingUsage:
        return EmbeddingUsage(self.tokens, self.tokens)


class TextTask(Generic[R]):
    """The endpoint of one task."""

    def __init__(
        self,
        edge: Edge,
        kind: type[R],
        suits: Callable[[ModelCard], bool],
        serve: Callable[[R, Numbers], Awaitable[list[bytes]]],
    ) -> None:
        """`suits` says which models can do it, for requests that name none."""
        self._edge = edge
        self._reader = RequestReader(kind)
        self._suits = suits
        self._serve = serve

    async def __call__(self, exchange: Exchange) -> None:
        call = exchange.call()
        request = await self._reader.read(exchange)
        names, name = self._edge.plane.names, name_or_only_model(self._edge.plane, exchange.account, request.model, self._suits)
        serve = partial(self._respond, exchange, request)
        await names.serve(call, name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _respond(self, exchange: Exchange, request: R, model: NamedModel, call: Call) -> None:
        edge = self._edge

        async def infer(tensors: TensorRequest, tokens: int) -> Buffer:
            estimated = msgspec.structs.replace(call, expected_tokens=tokens)
            response = await edge.plane.infer(model, tensors, estimated)
            exchange.hold(len(response))
            return response

        if not self._suits(model.card):
            raise InvalidRequest(f"model '{model.card.name}' cannot do this: see its inputs and outputs", param="model")
        max_bytes = exchange.settings.body_limits[Reads.TENSORS]
        numbers = Numbers(model.card, model.name, edge.limits, infer, exchange.in_steps, max_bytes)
        async with exchange.attended():
            response = await self._serve(request, numbers)
        await exchange.respond_in_pieces(response, (JSON,))


def scores_pairs(card: ModelCard) -> bool:
    """Whether the model is a cross-encoder."""
    return (
        card.kind is ModelKind.TENSOR
        and {spec.name for spec in card.inputs if spec.datatype == "BYTES"} >= {FIRST_INPUT, SECOND_INPUT}
        and any(spec.datatype in FLOATS for spec in card.outputs)
    )


def compares_texts(card: ModelCard) -> bool:
    return scores_pairs(card) or embeds_texts(card)


def classifies_texts(card: ModelCard) -> bool:
    return embeds_texts(card) and _labelled(card) is not None


def _labelled(card: ModelCard) -> TensorSpec | None:
    return next((spec for spec in card.outputs if spec.datatype in FLOATS and spec.labels), None)


def _cosines(queries: Vectors, documents: Vectors) -> Work[list[float]]:
    """Return the cosine of each document with the query at its place; one query stands for all documents."""
    scores: list[float] = []
    for index, document in enumerate(documents):
        query = queries[index if len(queries) > 1 else 0]
        scores.append(float((_unit(query) * _unit(document)).sum()))
        yield 0
    return scores


def _unit(vector: Vectors) -> Vectors:
    unit: Vectors = vector / np.maximum(np.linalg.norm(vector), 1e-12)
    return unit


async def rerank(request: RerankRequest, numbers: Numbers) -> list[bytes]:
    documents = [document if isinstance(document, str) else document.text for document in request.documents]
    scores = await numbers.scores([request.query], documents)
    best = sorted(range(len(documents)), key=lambda index: -scores[index])
    kept = best[: request.top_n] if request.top_n else best
    with_documents = request.return_documents is not False
    results = [
        Reranked(
            index=index,
            relevance_score=scores[index],
            document=Document(text=documents[index]) if with_documents else None,
        )
        for index in kept
    ]
    response = RerankResponse(id=_new_id("rerank"), model=numbers.name, results=results, usage=numbers.usage)
    return [msgspec.json.encode(response)]


async def score(request: ScoreRequest, numbers: Numbers) -> list[bytes]:
    firsts, seconds = _listed(request.text_1), _listed(request.text_2)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"'text_1' must be one text, or as many as 'text_2', which has {len(seconds)}; got {len(firsts)}", param="text_1"
        )
    scores = await numbers.scores(firsts, seconds)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    return [msgspec.json.encode(ScoreResponse(data=data, **_head("score", numbers)))]


async def classify(request: ClassifyRequest, numbers: Numbers) -> list[bytes]:
    rows = await numbers.rows(_listed(request.input))
    spec = _labelled(numbers.card)
    assert spec is not None
    labels = spec.labels

    def describe(index: int, probs: Any) -> Classification:
        best = int(rows[index].argmax())
        label = labels[best] if best < len(labels) else str(best)
        return Classification(index=index, label=label, probs=probs, num_classes=rows.shape[1])

    data = await numbers.run(rows_to_json(rows, describe))
    return with_rows(data, lambda data: ClassifyResponse(data=data, **_head("classify", numbers)))


async def pool(request: PoolingRequest, numbers: Numbers) -> list[bytes]:
    rows = await numbers.rows(prompts_of(request.input, "input"))
    packed = request.encoding_format == "base64"
    data = await numbers.run(rows_to_json(rows, lambda index, row: Pooled(index=index, data=row), packed=packed))
    return with_rows(data, lambda data: PoolingResponse(data=data, **_head("pool", numbers)))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _head(task: str, numbers: Numbers) -> dict[str, Any]:
    """Return the fields of a `TaskResponse`."""
    return {"id": _new_id(task), "created": int(time.time()), "model": numbers.name, "usage": numbers.usage}


def _new_id(task: str) -> str:
    return f"{task}-{secrets.token_hex(16)}"
