"""Requests and responses of rerank, score, classify and pooling, as `vllm serve` has them; rerank also as Cohere and Jina do."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dynamo.frontend.api.openai.requests import ModelRequest, TokenId
from dynamo.frontend.api.openai.response_objects import EmbeddingUsage

Texts = Annotated[str | list[str], Meta(description="A text, or an array of texts.")]


class TaskRequest(ModelRequest, kw_only=True, frozen=True):
    """What the requests have in common."""

    user: str | None = None


class Document(Struct, frozen=True, kw_only=True):
    text: str


class RerankRequest(TaskRequest, kw_only=True, frozen=True):
    """POST /v1/rerank"""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, description="How many documents to return, the most relevant ones; 0: all.")] | None = None
    return_documents: bool | None = None


class Reranked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[Reranked]
    usage: EmbeddingUsage


class ScoreRequest(TaskRequest, kw_only=True, frozen=True):
    """POST /v1/score: `text_1` with each of `text_2`, or pairs of as many."""

    text_1: Texts
    text_2: Texts


class Score(Struct, frozen=True, kw_only=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ClassifyRequest(TaskRequest, kw_only=True, frozen=True):
    """POST /v1/classify"""

    input: Texts


class Classification(Struct, frozen=True, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class PoolingRequest(TaskRequest, kw_only=True, frozen=True):
    """POST /pooling"""

    input: Annotated[str | list[str | TokenId | list[TokenId]], Meta(description="A text, or an array of texts.")]
    encoding_format: Literal["float", "base64"] | None = None


class Pooled(Struct, frozen=True, kw_only=True):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class TaskResponse(Struct, frozen=True, kw_only=True):
    """What the responses of all but rerank have in common."""

    id: str
    created: int
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ScoreResponse(TaskResponse, frozen=True, kw_only=True):
    data: list[Score]


class ClassifyResponse(TaskResponse, frozen=True, kw_only=True):
    data: list[Classification]


class PoolingResponse(TaskResponse, frozen=True, kw_only=True):
    data: list[Pooled]
