"""The operations of the OpenAI API and the tokenizer endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from dynamo.common.config import ConfigError
from dynamo.frontend.api.declaration import TEXT, TOKENS, shown
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorResponse
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.chat import ChatCompletions
from dynamo.frontend.api.openai.chat_batch import ChatBatch, ChatBatchRequest
from dynamo.frontend.api.openai.completions import Completions
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.invocations import Invocations
from dynamo.frontend.api.openai.media.operations import media_operations, relayed_or
from dynamo.frontend.api.openai.pooling.embeddings import EmbeddingsEndpoint, embeds_texts
from dynamo.frontend.api.openai.pooling.text_task_objects import (
    ClassifyRequest,
    ClassifyResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from dynamo.frontend.api.openai.pooling.text_tasks import (
    TextTask,
    classifies_texts,
    classify,
    compares_texts,
    pool,
    rerank,
    score,
)
from dynamo.frontend.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from dynamo.frontend.api.openai.response_objects import (
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    Tokenized,
    TokenizerDescription,
)
from dynamo.frontend.api.openai.responses.operations import response_operations
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.api.openai.token_io.operations import generate_operation, rendering_operations
from dynamo.frontend.api.openai.tokens import Detokenize, Tokenize, TokenizerInfo
from dynamo.frontend.security.surfaces import Surface


def openai_operations(edge: Edge) -> list[Operation]:
    describe = partial(Operation, errors=OPENAI_ERRORS, error=ErrorResponse)
    infer = partial(describe, declared=TEXT, group="OpenAI")
    tokens = partial(describe, declared=TOKENS, group="Tokens")
    tokenize, detokenize = Tokenize(edge), Detokenize(edge)
    served = [
        infer(
            path="/v1/chat/completions",
            endpoint="chat_completions",
            handle=relayed_or(edge, ChatCompletions(edge)),
            summary="Continue a conversation",
            request=ChatRequest,
            response=ChatCompletion,
            streams=True,
        ),
        infer(
            path="/v1/completions",
            endpoint="completions",
            handle=Completions(edge),
            summary="Continue a text",
            request=CompletionRequest,
            response=Completion,
            streams=True,
        ),
        *response_operations(edge, infer, tokens),
        infer(
            path="/v1/embeddings",
            endpoint="embeddings",
            handle=EmbeddingsEndpoint(edge),
            summary="Texts to vectors",
            request=EmbeddingRequest,
            response=Embeddings,
        ),
        *_text_tasks(edge, infer),
        *media_operations(edge, infer),
        generate_operation(edge, infer),
        infer(
            path="/v1/chat/completions/batch",
            endpoint="chat_completions_batch",
            handle=ChatBatch(edge),
            summary="Continue several conversations",
            request=ChatBatchRequest,
            response=ChatCompletion,
        ),
    ]
    return [
        *served,
        infer(path="/invocations", endpoint="invocations", handle=Invocations(edge, served)),
        tokens(path="/tokenize", handle=tokenize, summary="Text to tokens", request=TokenizeRequest, response=Tokenized),
        tokens(path="/v1/tokenize", handle=tokenize),
        tokens(
            method="GET",
            path="/tokenizer_info",
            declared=shown(Surface.METADATA),
            handle=TokenizerInfo(edge),
            summary="A model's tokenizer, with its chat template",
            response=TokenizerDescription,
        ),
        tokens(path="/detokenize", handle=detokenize, summary="Tokens to text", request=DetokenizeRequest, response=Detokenized),
        tokens(path="/v1/detokenize", handle=detokenize),
        *rendering_operations(edge, tokens),
    ]


def _text_tasks(edge: Edge, infer: Callable[..., Operation]) -> list[Operation]:
    """Return rerank, score, classify and pooling. The paths without a summary are those that other servers have besides."""
    ranks = TextTask(edge, RerankRequest, compares_texts, rerank)
    scores = TextTask(edge, ScoreRequest, compares_texts, score)
    classifies = TextTask(edge, ClassifyRequest, classifies_texts, classify)
    pools = TextTask(edge, PoolingRequest, embeds_texts, pool)
    return [
        infer(
            path="/v1/rerank",
            endpoint="rerank",
            handle=ranks,
            summary="Documents by their relevance to a query",
            request=RerankRequest,
            response=RerankResponse,
        ),
        infer(path="/v2/rerank", endpoint="rerank", handle=ranks),
        infer(path="/rerank", endpoint="rerank", handle=ranks),
        infer(
            path="/v1/score",
            endpoint="score",
            handle=scores,
            summary="How alike texts are",
            request=ScoreRequest,
            response=ScoreResponse,
        ),
        infer(path="/score", endpoint="score", handle=scores),
        infer(
            path="/v1/classify",
            endpoint="classify",
            handle=classifies,
            summary="Texts to classes",
            request=ClassifyRequest,
            response=ClassifyResponse,
        ),
        infer(path="/classify", endpoint="classify", handle=classifies),
        infer(
            path="/pooling",
            endpoint="pooling",
            handle=pools,
            summary="Texts to what a model computes of them",
            request=PoolingRequest,
            response=PoolingResponse,
        ),
    ]


def read_request_template(path: Path | None) -> RequestTemplate:
    """Read the file of `--request-template`. Raises ConfigError."""
    if path is None:
        return RequestTemplate()
    try:
        return msgspec.json.decode(path.expanduser().read_bytes(), type=RequestTemplate)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--request-template {path} cannot be read: {error}") from error
