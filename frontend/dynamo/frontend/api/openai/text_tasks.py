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
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensor_request import TensorRequest
from dynamo.common.tensors import encode_bytes
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.embeddings import (
    FLOATS,
    base64_of,
    embeds_texts,
    expected_tokens,
    from_tensors,
    to_tensors,
)
from dynamo.frontend.api.openai.response_objects import EmbeddingUsage
from dynamo.frontend.api.openai.text_task_objects import (
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
from dynamo.frontend.api.openai.to_text import prompts_of
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.named import serve_by_name
from dynamo.frontend.api.text.rules import check_chars
from dynamo.frontend.config import TextLimits
from dynamo.frontend.metrics import RequestType
from dynamo.protos.inference_pb2 import ModelInferRequest

Vectors = NDArray[np.float32]
R = TypeVar("R", bound=TaskRequest)

FIRST_INPUT, SECOND_INPUT = "text", "text_pair"


@dataclass(slots=True)
class Numbers:
    """The model that serves one request: texts to rows of numbers."""

    card: ModelCard
    name: str
    limits: TextLimits
    infer: Callable[[TensorRequest, int], Awaitable[bytes]]
    """Returns the response to a request of about so many tokens."""
    tokens: int = 0
    """Of all texts so far, as the model counts them."""

    async def rows(self, texts: Sequence[str | list[int]]) -> Vectors:
        """Return a row for each text."""
        self._check(texts)
        return await self._run(to_tensors(texts, self.name, self.card), texts, len(texts))

    async def scores(self, queries: Sequence[str], documents: Sequence[str]) -> list[float]:
        """Return how well each document matches the query at its place; one query stands for all documents."""
        if scores_pairs(self.card):
            firsts = [*queries] * len(documents) if len(queries) == 1 else queries
            self._check(documents, firsts)
            head = ModelInferRequest(model_name=self.name)
            for name in (FIRST_INPUT, SECOND_INPUT):
                head.inputs.add(name=name, datatype="BYTES", shape=[len(documents)])
            request = TensorRequest.build(head, [encode_bytes(list(firsts)), encode_bytes(list(documents))])
            column = (await self._run(request, (*firsts, *documents), len(documents)))[:, 0]
            return [float(score) for score in column]
        vectors = await self.rows((*queries, *documents))
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return [float(score) for score in (unit[: len(queries)] * unit[len(queries) :]).sum(axis=1)]

    async def _run(self, request: TensorRequest, texts: Sequence[str | list[int]], count: int) -> Vectors:
        vectors, tokens = from_tensors(await self.infer(request, expected_tokens(texts)), count)
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
        serve: Callable[[R, Numbers], Awaitable[msgspec.Struct]],
    ) -> None:
        """`suits` says which models can do it, for requests that name none."""
        self._edge = edge
        self._reader = RequestReader(kind)
        self._suits = suits
        self._serve = serve

    async def __call__(self, exchange: Exchange) -> None:
        caller = exchange.caller()
        request = await self._reader.read(exchange)
        plane = self._edge.plane
        name = name_or_only_model(plane, exchange.account, request.model, self._suits)

        async def attempt(model: str, caller: Caller) -> None:
            call = caller.call(endpoint=exchange.endpoint, request_type=RequestType.UNARY)

            async def infer(tensors: TensorRequest, tokens: int) -> bytes:
                return bytes(await plane.infer(tensors, msgspec.structs.replace(call, expected_tokens=tokens)))

            card = plane.card(exchange.account, model)
            if not self._suits(card):
                raise InvalidRequest(f"model '{card.name}' cannot do this: see its inputs and outputs", param="model")
            numbers = Numbers(card, model, self._edge.limits, infer)
            async with exchange.attended():
                response = await self._serve(request, numbers)
            call.account.charge(model, numbers.tokens)
            await exchange.respond(msgspec.json.encode(response))

        await serve_by_name(plane, caller, name, attempt, exchange.has_begun, user=request.user)


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


async def rerank(request: RerankRequest, numbers: Numbers) -> RerankResponse:
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
    return RerankResponse(id=_new_id("rerank"), model=numbers.name, results=results, usage=numbers.usage)


async def score(request: ScoreRequest, numbers: Numbers) -> ScoreResponse:
    firsts, seconds = _listed(request.text_1), _listed(request.text_2)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"'text_1' must be one text, or as many as 'text_2', which has {len(seconds)}; got {len(firsts)}", param="text_1"
        )
    scores = await numbers.scores(firsts, seconds)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    return ScoreResponse(data=data, **_head("score", numbers))


async def classify(request: ClassifyRequest, numbers: Numbers) -> ClassifyResponse:
    rows = await numbers.rows(_listed(request.input))
    spec = _labelled(numbers.card)
    assert spec is not None
    data = []
    for index, row in enumerate(rows):
        best = int(row.argmax())
        label = spec.labels[best] if best < len(spec.labels) else str(best)
        data.append(Classification(index=index, label=label, probs=row.tolist(), num_classes=len(row)))
    return ClassifyResponse(data=data, **_head("classify", numbers))


async def pool(request: PoolingRequest, numbers: Numbers) -> PoolingResponse:
    rows = await numbers.rows(prompts_of(request.input, "input"))
    is_packed = request.encoding_format == "base64"
    data = [Pooled(index=index, data=base64_of(row) if is_packed else row.tolist()) for index, row in enumerate(rows)]
    return PoolingResponse(data=data, **_head("pool", numbers))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _head(task: str, numbers: Numbers) -> dict[str, Any]:
    """Return the fields of a `TaskResponse`."""
    return {"id": _new_id(task), "created": int(time.time()), "model": numbers.name, "usage": numbers.usage}


def _new_id(task: str) -> str:
    return f"{task}-{secrets.token_hex(16)}"
