"""POST /v1/responses: the Responses API, without stored state."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.common.errors import Code, DynamoError, EngineError
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.logprobs import chat_logprobs
from dynamo.frontend.api.openai.requests import ChatRequest
from dynamo.frontend.api.openai.response_events import ResponseObject, ResponseWriter
from dynamo.frontend.api.openai.response_objects import TokenLogprob
from dynamo.frontend.api.openai.response_requests import ResponsesRequest
from dynamo.frontend.api.openai.to_text import call_of, chat_to_text, session_of
from dynamo.frontend.api.statuses import log_failure, public_message
from dynamo.frontend.api.text.named import serve_by_name
from dynamo.frontend.api.text.rules import parse_delta
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, make_parser
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
        caller = exchange.identified(caller, request.request_id)

        async def attempt(model: str, caller: Caller) -> None:
            await self._serve(exchange, request, msgspec.structs.replace(chat, model=model), caller, started)

        session, user = session_of(chat), chat.user
        await serve_by_name(edge.plane, caller, chat.model_name, attempt, exchange.has_begun, session=session, user=user)

    async def _serve(
        self, exchange: Exchange, request: ResponsesRequest, chat: ChatRequest, caller: Caller, started: float
    ) -> None:
        edge = self._edge
        card = edge.plane.card(exchange.account, chat.model_name)
        prepared = await edge.offload.run_if(exchange.has_large_body, chat_to_text, chat, card, edge.parsers, edge.limits)
        generation = edge.plane.generate(prepared.texts[0], call_of(chat, caller, exchange.endpoint))
        response = _response(request, chat.model_name, int(started))
        async with exchange.attended(), generation:
            texts = None
            if request.wants_logprobs:
                texts = TokenTexts((await edge.plane.text_model(exchange.account, chat.model_name)).tokenizer)
            parser = make_parser(prepared.parsers, prepared.tools, generation.prompt_end)
            feeder = _Feeder(response, request, parser, texts)
            if request.stream:
                await self._stream(exchange, generation, feeder)
            else:
                await self._respond(exchange, generation, feeder)

    async def _respond(self, exchange: Exchange, generation: Generation, feeder: _Feeder) -> None:
        writer = feeder.writer
        reason = None
        while deltas := await generation.read():
            reason = feeder.add(deltas) or reason
        await exchange.respond(encode(writer.finish(_finished(reason), generation.summary, self._edge.clock())))

    async def _stream(self, exchange: Exchange, generation: Generation, feeder: _Feeder) -> None:
        writer = feeder.writer
        reason = None
        async with exchange.events() as stream:
            try:
                while deltas := await generation.read():
                    reason = feeder.add(deltas) or reason
                    await stream.write(writer.take())
                writer.finish(_finished(reason), generation.summary, self._edge.clock())
            except Exception as error:
                if not stream.begun or exchange.client_left:  # it can still fail with a status, or the client is gone
                    raise
                log_failure(error, exchange.request_id, exchange.path)
                code = error.code if isinstance(error, DynamoError) else Code.INTERNAL
                writer.fail(_FAILURES.get(code, "server_error"), public_message(error))
            await stream.end(writer.take())


class _Feeder:
    """Parses deltas and hands their parts to a writer."""

    def __init__(
        self, response: ResponseObject, request: ResponsesRequest, parser: OutputParser | None, texts: TokenTexts | None
    ) -> None:
        """`texts` is for log probabilities; None: there are none."""
        self.writer = ResponseWriter(response, stream=bool(request.stream))
        self._parser = parser
        self._texts = texts
        self._alternatives = request.top_logprobs or 0
        self._shows_reasoning = request.include_reasoning is not False
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text the parser holds back."""

    def add(self, deltas: list[TextDelta]) -> FinishReason | None:
        """Return the reason if the deltas end the response."""
        reason = None
        for delta in deltas:
            parts: Sequence[Part] = [Content(delta.text)] if delta.text else []
            if self._parser is not None:
                parts = parse_delta(self._parser, delta)
            self.writer.reasoning.add(parts, len(delta.tokens))
            if self._texts is not None and delta.logprobs:
                self._logprobs += chat_logprobs(delta.logprobs, self._texts, self._alternatives)
            for part in parts:
                if self._shows_reasoning or not isinstance(part, Reasoning):
                    self.writer.add(part, self._logprobs if isinstance(part, Content) else ())
                self._logprobs = []
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
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that the request set."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
