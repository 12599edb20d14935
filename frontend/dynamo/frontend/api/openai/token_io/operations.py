"""The operations on tokens."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import ChatRequest, CompletionRequest
from dynamo.frontend.api.openai.response_objects import ChatCompletion, Completion
from dynamo.frontend.api.openai.token_io.derender import DerenderChat, DerenderCompletion
from dynamo.frontend.api.openai.token_io.generate import GenerateTokens
from dynamo.frontend.api.openai.token_io.objects import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    RenderedRequest,
    TokensRequest,
    TokensResponse,
)
from dynamo.frontend.api.openai.token_io.render import RenderChat, RenderCompletion

Describe = Callable[..., Operation]


def generate_operation(edge: Edge, infer: Describe) -> Operation:
    return infer(
        path="/inference/v1/generate",
        endpoint="generate_tokens",
        handle=GenerateTokens(edge),
        summary="Continue tokens, and return tokens",
        request=TokensRequest,
        response=TokensResponse,
        streams=True,
    )


def rendering_operations(edge: Edge, tokens: Describe) -> list[Operation]:
    return [
        tokens(
            path="/v1/chat/completions/render",
            handle=RenderChat(edge),
            summary="A chat completion as a request in tokens",
            request=ChatRequest,
            response=RenderedRequest,
        ),
        tokens(
            path="/v1/completions/render",
            handle=RenderCompletion(edge),
            summary="A text completion as requests in tokens",
            request=CompletionRequest,
            response=list[RenderedRequest],
        ),
        tokens(
            path="/v1/chat/completions/derender",
            handle=DerenderChat(edge),
            summary="Generated tokens as a chat completion",
            request=DerenderChatRequest,
            response=ChatCompletion,
        ),
        tokens(
            path="/v1/completions/derender",
            handle=DerenderCompletion(edge),
            summary="Generated tokens as a text completion",
            request=DerenderCompletionRequest,
            response=Completion,
        ),
    ]
