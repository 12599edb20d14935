"""The operations on tokens."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.token_io.generate import GenerateTokens
from dynamo.frontend.api.openai.token_io.objects import TokensRequest, TokensResponse

Describe = Callable[..., Operation]


def token_operations(edge: Edge, infer: Describe) -> list[Operation]:
    return [
        infer(
            path="/inference/v1/generate",
            endpoint="generate_tokens",
            handle=GenerateTokens(edge),
            summary="Continue tokens, and return tokens",
            request=TokensRequest,
            response=TokensResponse,
            streams=True,
        ),
    ]
