"""POST /v1/responses: the Responses API, without stored state."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from dynamo.common.errors import Code, DynamoError, EngineError
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.response_events import ResponseObject, ResponseWriter
from dynamo.frontend.api.openai.response_requests import ResponsesRequest
from dynamo.frontend.api.openai.to_text import PreparedRequest, call_of, chat_to_text
from dynamo.frontend.api.statuses import log_failure, public_message
from dynamo.frontend.api.text.rules import parse_delta
from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, make_parser
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.serving.data_plane import Generation

_FAILURES = {Code.INVALID_REQUEST: "invalid_prompt", Code.OVERLOADED: "rate_limit_exceeded"}


class Responses:
    """The endpoint of the Responses API, streamed or whole."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(ResponsesRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        started = edge.clock()
        caller = exchange.caller()
        request = await self._reader.read(exchange)
        chat = edge.completed(await edge.offload.run_if(exchange.has_large_body, request.to_chat), exchange.account)
        card = edge.plane.card(exchange.account, chat.model_name)
        prepared = await edge.offload.run_if(exchange.has_large_body, chat_to_text, chat, card, edge.parsers, edge.limits)
        generation = edge.plane.generate(prepared.texts[0], call_of(chat, caller, exchange.endpoint))
        response = _response(request, chat.model_name, int(started))
        async with exchange.attended(), generation:
            if request.stream:
                await self._stream(exchange, generation, prepared, response)
            else:
                await self._respond(exchange, generation, prepared, response)

    async def _respond(
        self, exchange: Exchange, generation: Generation, prepared: PreparedRequest, response: ResponseObject
    ) -> None:
        writer = ResponseWriter(response, stream=False)
        parser = make_parser(prepared.parsers, prepared.tools, generation.prompt_end)
        reason = None
        while deltas := await generation.read():
            reason = _add(deltas, writer, parser) or reason
        await exchange.respond(encode(writer.finish(_finished(reason), generation.summary, self._edge.clock())))

    async def _stream(
        self, exchange: Exchange, generation: Generation, prepared: PreparedRequest, response: ResponseObject
    ) -> None:
        writer = ResponseWriter(response, stream=True)
        parser = make_parser(prepared.parsers, prepared.tools, generation.prompt_end)
        reason = None
        async with exchange.events() as stream:
            try:
                while deltas := await generation.read():
                    reason = _add(deltas, writer, parser) or reason
                    await stream.write(writer.take())
                writer.finish(_finished(reason), generation.summary, self._edge.clock())
            except Exception as error:
                if not stream.begun or exchange.client_left:  # it can still fail with a status, or the client is gone
                    raise
                log_failure(error, exchange.request_id, exchange.path)
                code = error.code if isinstance(error, DynamoError) else Code.INTERNAL
                writer.fail(_FAILURES.get(code, "server_error"), public_message(error))
            await stream.end(writer.take())


def _add(deltas: list[TextDelta], writer: ResponseWriter, parser: OutputParser | None) -> FinishReason | None:
    reason = None
    for delta in deltas:
        parts: list[Part] = parse_delta(parser, delta) if parser is not None else [Content(delta.text)] if delta.text else []
        writer.reasoning.add(parts, len(delta.tokens))
        for part in parts:
            writer.add(part)
        reason = delta.finish_reason or reason
    return reason


def _finished(reason: FinishReason | None) -> FinishReason:
    if reason is None:
        raise EngineError("the engine ended without finishing its response")
    return reason


def _response(request: ResponsesRequest, model: str, created: int) -> ResponseObject:
    format: dict[str, Any] = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        format = _set_fields(request.text.format)
    return ResponseObject(
        id=f"resp_{secrets.token_hex(16)}",
        created_at=created,
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None},
        temperature=request.temperature,
        text={"format": format},
        tool_choice=request.tool_choice or "auto",
        tools=[{"parameters": None, "strict": None, **_set_fields(tool)} for tool in request.tools or ()],
        top_p=request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that the request set."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
