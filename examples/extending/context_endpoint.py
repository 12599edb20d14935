"""An HTTP endpoint: `POST /v1/context` tells how many tokens a prompt leaves of a model's context."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dynamo.frontend.api.declaration import TOKENS
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorResponse
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.text.rules import llm_of
from dynamo.frontend.serving.data_plane import DataPlane


class ContextRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Annotated[str, Meta(max_length=1 << 20)]


class ContextResponse(Struct, frozen=True):
    prompt_tokens: int
    tokens_left: int
    """0 if the prompt is too long."""


class ContextEndpoint:
    """The handler. What it raises becomes an error response: ModelNotFound is a 404, InvalidRequest a 400."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._decoder = msgspec.json.Decoder(ContextRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.call()
        request = await read_json(exchange, self._decoder)
        plane = self._plane
        llm = llm_of(plane.card(exchange.account, request.model))
        text = await plane.text_model(exchange.account, request.model)
        count = len(await text.tokenizer.encode(request.prompt, special_tokens=True))
        await exchange.respond(msgspec.json.encode(ContextResponse(count, max(0, llm.context_length - count))))


def context_operations(plane: DataPlane) -> list[Operation]:
    return [
        Operation(
            path="/v1/context",
            declared=TOKENS,
            errors=OPENAI_ERRORS,
            handle=ContextEndpoint(plane),
            summary="How many tokens a prompt leaves of the context",
            group="Tokens",
            request=ContextRequest,
            response=ContextResponse,
            error=ErrorResponse,
        )
    ]
