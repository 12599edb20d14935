"""The paths of the OpenAI API and the tokenizer endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.routing import BaseRoute, Route

from dynamo.common.config import ConfigError
from dynamo.frontend.api.http.exchange import Endpoint, Exchange, HttpSettings
from dynamo.frontend.api.http.openapi import Operation
from dynamo.frontend.api.openai.chat import ChatCompletions
from dynamo.frontend.api.openai.completions import Completions
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.embeddings import EmbeddingsEndpoint
from dynamo.frontend.api.openai.errors import OPENAI_ERRORS
from dynamo.frontend.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from dynamo.frontend.api.openai.response_events import ResponseObject
from dynamo.frontend.api.openai.response_objects import (
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    ErrorResponse,
    Tokenized,
)
from dynamo.frontend.api.openai.response_requests import ResponsesRequest
from dynamo.frontend.api.openai.responses import Responses
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.api.openai.tokens import Detokenize, Tokenize

_GROUP = "OpenAI"
OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        summary="Continue a conversation",
        group=_GROUP,
        request=ChatRequest,
        answer=ChatCompletion,
        error=ErrorResponse,
        streams=True,
    ),
    Operation(
        path="/v1/completions",
        summary="Continue a text",
        group=_GROUP,
        request=CompletionRequest,
        answer=Completion,
        error=ErrorResponse,
        streams=True,
    ),
    Operation(
        path="/v1/responses",
        summary="Continue a conversation, by the Responses API",
        group=_GROUP,
        request=ResponsesRequest,
        answer=ResponseObject,
        error=ErrorResponse,
        streams=True,
    ),
    Operation(
        path="/v1/embeddings",
        summary="Texts to vectors",
        group=_GROUP,
        request=EmbeddingRequest,
        answer=Embeddings,
        error=ErrorResponse,
    ),
    Operation(
        path="/tokenize", summary="Text to tokens", group="Tokens", request=TokenizeRequest, answer=Tokenized, error=ErrorResponse
    ),
    Operation(
        path="/detokenize",
        summary="Tokens to text",
        group="Tokens",
        request=DetokenizeRequest,
        answer=Detokenized,
        error=ErrorResponse,
    ),
)


def openai_routes(edge: Edge, settings: HttpSettings) -> list[BaseRoute]:
    tokenize, detokenize = Tokenize(edge), Detokenize(edge)
    handlers: dict[str, Callable[[Exchange], Awaitable[None]]] = {
        "/v1/chat/completions": ChatCompletions(edge),
        "/v1/completions": Completions(edge),
        "/v1/embeddings": EmbeddingsEndpoint(edge),
        "/v1/responses": Responses(edge),
        "/tokenize": tokenize,
        "/v1/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/detokenize": detokenize,
    }
    return [Route(path, Endpoint(handle, OPENAI_ERRORS, settings), methods=["POST"]) for path, handle in handlers.items()]


def read_request_template(path: Path | None) -> RequestTemplate:
    """Read the file of `--request-template`. Raises ConfigError."""
    if path is None:
        return RequestTemplate()
    try:
        return msgspec.json.decode(path.expanduser().read_bytes(), type=RequestTemplate)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--request-template {path} cannot be read: {error}") from error
