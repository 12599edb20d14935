"""An endpoint whose requests and responses pass through to a model that takes them whole: see `dynamo.common.tensors.relay`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.http.served import media_type
from dynamo.common.tensors.relay import SERVER_MODEL, RelayedPart, RelayedRequest, part_from_outputs, relays_http, to_tensors
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import scanned_body
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.media.relayed_bodies import FormBody, JsonBody, RelayedBody
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.tensor_responses import TensorResponses

_LONG_BYTES = 1 << 20
"""Longer bodies are read and copied in a thread."""
_EVENTS = "text/event-stream"


class Relay:
    """The endpoint of one path, whose body is JSON or a form."""

    def __init__(self, edge: Edge, path: str, *, is_form: bool = False) -> None:
        self._edge = edge
        self._path = path
        self._is_form = is_form

    async def __call__(self, exchange: Exchange) -> None:
        call = exchange.call()
        body = await (self._form(exchange) if self._is_form else self._json(exchange))
        edge, is_long = self._edge, exchange.body_bytes > _LONG_BYTES
        permit = partial(body.permit, exchange.account, edge.limits.max_choices, templates=edge.trusts_templates)
        sequences = await edge.offload.run_if(is_long, permit)
        name = name_or_only_model(edge.plane, exchange.account, body.model, relays_http)
        await edge.plane.names.serve(call, name, partial(self._respond, exchange, body, sequences), has_begun=exchange.has_begun)

    async def _form(self, exchange: Exchange) -> RelayedBody:
        body = await exchange.any_body()
        kind = exchange.headers.get("content-type", "")
        return await self._edge.offload.run_if(len(body) > _LONG_BYTES, FormBody, body, kind)

    async def _json(self, exchange: Exchange) -> RelayedBody:
        body = await scanned_body(exchange)
        return await self._edge.offload.run_if(len(body) > _LONG_BYTES, JsonBody, body, exchange.settings.options.max_json_depth)

    async def _respond(self, exchange: Exchange, body: RelayedBody, sequences: int, model: NamedModel, call: Call) -> None:
        if not relays_http(model.card):
            raise InvalidRequest(
                f"model '{model.card.name}' has no {self._path}: that takes a model behind --remote-kind relay", param="model"
            )

        def tensors() -> RelayedRequest:
            named = body.naming(model.card.labels.get(SERVER_MODEL, model.card.name))
            return RelayedRequest(self._path, body.content_type, named)

        is_long = exchange.body_bytes > _LONG_BYTES
        request = await self._edge.offload.run_if(is_long, lambda: to_tensors(tensors(), model.name))
        async with exchange.attended(), self._edge.plane.infer_stream(model, request, call, sequences=sequences) as responses:
            parts = parts_of(responses)
            await pass_on(exchange, await anext(parts, None), parts)


async def pass_on(exchange: Exchange, first: RelayedPart | None, parts: AsyncGenerator[RelayedPart, None]) -> None:
    """Respond with what a relay responds: the first part and those that follow it."""
    if first is None or not 200 <= first.status <= 599:
        raise EngineError("the model responded without a status")
    if first.status == 200 and media_type(first.content_type) == _EVENTS:
        async with exchange.events() as stream:
            await stream.write(bytes(first.body))
            async for part in parts:
                await stream.write(bytes(part.body))
            return await stream.end(b"")
    kind = (first.content_type or "application/octet-stream").encode("latin-1", "replace")
    await exchange.respond_while_read(None, _bodies(first, parts), ((b"content-type", kind),), first.status)


async def parts_of(responses: TensorResponses) -> AsyncGenerator[RelayedPart, None]:
    """Yield the parts of a response of a relay."""
    while batch := await responses.read():
        for encoded in batch:
            yield part_from_outputs(encoded)


async def _bodies(first: RelayedPart, parts: AsyncGenerator[RelayedPart, None]) -> AsyncGenerator[Buffer, None]:
    """Yield what there is of the body; an empty piece would end it."""
    if first.body:
        yield first.body
    async for part in parts:
        if part.body:
            yield part.body
