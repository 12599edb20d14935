"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from dynamo.common.errors import EngineError
from dynamo.common.generation import FinishReason, Summary
from dynamo.common.process.background import awaited
from dynamo.frontend.api.anthropic.requests import CountRequest, MessagesRequest, PreparedMessages, conversation, to_text
from dynamo.frontend.api.declaration import TEXT, TOKENS
from dynamo.frontend.api.http.errors import ErrorForm
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.statuses import public_message
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.generations import read_carried
from dynamo.frontend.api.text.model_names import described_model, name_or_only_model
from dynamo.frontend.api.text.rules import llm_of, new_tool_call_id, one_by_one, parse_delta
from dynamo.frontend.config import TextLimits
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.parsers import Content, OutputParser, OutputParsers, Part, Reasoning, ToolCall, make_parser
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation
from dynamo.frontend.serving.model_catalog import NamedModel

encode = msgspec.json.Encoder().encode

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def _error_body(error: BaseException, status: int) -> bytes:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": public_message(error)}})


def _event(kind: str, body: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


ANTHROPIC_ERRORS = ErrorForm(
    body=_error_body, event=lambda error, status: _event("error", _error_body(error, status)), request_id=b"request-id"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesEdge:
    """The dependencies of an endpoint."""

    plane: DataPlane
    limits: TextLimits = field(default_factory=TextLimits)
    offload: Offload = field(default_factory=Offload)
    """For large requests."""
    parsers: OutputParsers = field(default_factory=lambda: OutputParsers({}, {}))


def anthropic_operations(edge: MessagesEdge) -> list[Operation]:
    return [
        Operation(
            path="/v1/messages",
            declared=TEXT,
            errors=ANTHROPIC_ERRORS,
            handle=Messages(edge),
            endpoint="anthropic_messages",
            summary="Continue a conversation",
            group="Anthropic",
            request=MessagesRequest,
            streams=True,
        ),
        Operation(
            path="/v1/messages/count_tokens",
            declared=TOKENS,
            errors=ANTHROPIC_ERRORS,
            handle=CountTokens(edge),
            summary="Length of a conversation",
            group="Anthropic",
            request=CountRequest,
        ),
    ]


class CountTokens:
    """The endpoint that counts the tokens of a conversation."""

    def __init__(self, edge: MessagesEdge) -> None:
        self._edge = edge
        self._reader = RequestReader(CountRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._reader.read(exchange)
        model = described_model(self._edge.plane, exchange.account, request.model)
        llm = llm_of(self._edge.plane.card(exchange.account, model))
        text = await self._edge.plane.text_model(exchange.account, model)
        is_large = exchange.has_large_body
        prompt = await text.render(await self._edge.offload.run_if(is_large, conversation, request, llm, self._edge.limits))
        tokens = await text.tokenizer.encode(prompt, special_tokens=False)
        await exchange.respond(encode({"input_tokens": len(tokens)}))


class Messages:
    """The endpoint that continues a conversation, streamed or whole."""

    def __init__(self, edge: MessagesEdge) -> None:
        self._edge = edge
        self._reader = RequestReader(MessagesRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        call = exchange.call()
        request = await self._reader.read(exchange)
        if request.stream:
            call = msgspec.structs.replace(call, request_type=RequestType.STREAM)
        name = name_or_only_model(edge.plane, exchange.account, request.model)
        serve = partial(self._serve, exchange, request)
        await edge.plane.names.serve(call, name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _serve(self, exchange: Exchange, request: MessagesRequest, model: NamedModel, call: Call) -> None:
        edge, request = self._edge, msgspec.structs.replace(request, model=model.name)
        prepared = await edge.offload.run_if(exchange.has_large_body, to_text, request, model.card, edge.parsers, edge.limits)
        generation = edge.plane.generate(model, prepared.text, call)
        async with exchange.attended(), generation:
            if exchange.progress.carried is not None:
                await read_carried(generation)
            elif request.stream:
                await _stream(exchange, generation, prepared)
            else:
                await _respond(exchange, generation, prepared)


async def _respond(exchange: Exchange, generation: Generation, prepared: PreparedMessages) -> None:
    writer = MessageWriter(prepared.text.model, generation.prompt_tokens, stream=False)
    await _read_all(exchange, generation, prepared, writer, None)
    await exchange.respond(encode(writer.message(generation.summary)))


async def _stream(exchange: Exchange, generation: Generation, prepared: PreparedMessages) -> None:
    writer = MessageWriter(prepared.text.model, generation.prompt_tokens, stream=True)
    async with exchange.events() as stream:
        # In a task of its own: a token wakes that one, and not each of the coroutines that wait for the end of the stream.
        await awaited(_read_all(exchange, generation, prepared, writer, stream.write))
        writer.finish(generation.summary)
        await stream.end(writer.take())


async def _read_all(
    exchange: Exchange, generation: Generation, prepared: PreparedMessages, writer: MessageWriter, write: Any
) -> None:
    parser = make_parser(prepared.parsers, prepared.tools, generation.prompt_end)
    gathering = Gathering(exchange.hold)
    while deltas := await generation.read():
        gathering.add(deltas)
        if parser is not None and len(deltas) > 1:
            await exchange.in_steps(one_by_one(partial(writer.add, parser=parser), deltas))
        else:
            for delta in deltas:
                writer.add(delta, parser)
        if write is not None and (events := writer.take()):
            await write(events)


class MessageWriter:
    """Turns deltas into content blocks and, for streams, into events, which `take` returns."""

    def __init__(self, model: str, prompt_tokens: int, *, stream: bool) -> None:
        self._stream = stream
        self._events: list[bytes] = []
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._field = ""
        """The field of the open block that the pieces belong to; empty if no block is open."""
        self._delta = b""
        """The beginning of a delta event, up to its text."""
        self._call = -1
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        if stream:
            usage = _usage(Summary(prompt_tokens=prompt_tokens))
            self._emit("message_start", message={**self._head, "usage": usage})
            self._emit("ping")

    def take(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = b"".join(self._events), []
        return events

    def add(self, delta: TextDelta, parser: OutputParser | None) -> None:
        parts: list[Part] = parse_delta(parser, delta) if parser is not None else [Content(delta.text)] if delta.text else []
        for part in parts:
            self._add(part)
        if delta.finish_reason is not None:
            self._reason, self._stop = delta.finish_reason, delta.stop_reason

    def message(self, summary: Summary) -> dict[str, Any]:
        """Return the whole response. Raises EngineError if it was not finished."""
        self._close()
        return {**self._head, "content": self._blocks, **self._ending(), "usage": _usage(summary)}

    def finish(self, summary: Summary) -> None:
        """Write the last events. Raises EngineError if the response was not finished."""
        ending = self._ending()
        if not self._blocks:
            self._open({"type": "text", "text": ""}, "text", "text_delta")
        self._close()
        self._emit("message_delta", delta=ending, usage=_usage(summary))
        self._emit("message_stop")

    def _ending(self) -> dict[str, str | None]:
        if self._reason is None:
            raise EngineError("the engine ended without finishing its response")
        stop = self._stop if isinstance(self._stop, str) else None
        if stop is not None:
            reason = "stop_sequence"
        elif self._reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self._reason is FinishReason.CONTENT_FILTER:
            reason = "refusal"
        else:
            reason = "tool_use" if self._call >= 0 else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _add(self, part: Part) -> None:
        if isinstance(part, ToolCall):
            if part.index != self._call:
                self._call = part.index
                block = {"type": "tool_use", "id": new_tool_call_id("toolu_"), "name": part.name, "input": {}}
                self._open(block, "partial_json", "input_json_delta")
            piece = part.arguments
        else:
            if isinstance(part, Reasoning) and self._field != "thinking":
                self._open({"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking_delta")
            elif isinstance(part, Content) and self._field != "text":
                self._open({"type": "text", "text": ""}, "text", "text_delta")
            piece = part.text
        if piece:
            self._pieces.append(piece)
            if self._stream:
                self._events.append(self._delta + encode(piece) + b"}}\n\n")

    def _open(self, block: dict[str, Any], field: str, delta: str) -> None:
        self._close()
        index = len(self._blocks)
        self._blocks.append(block)
        self._field = field
        self._pieces = []
        self._emit("content_block_start", index=index, content_block=block)
        start = encode({"type": "content_block_delta", "index": index, "delta": {"type": delta}})
        self._delta = b"event: content_block_delta\ndata: " + start[:-2] + b',"' + field.encode() + b'":'

    def _close(self) -> None:
        if not self._field:
            return
        text = "".join(self._pieces)
        index = len(self._blocks) - 1
        if self._field == "partial_json":
            self._blocks[index] = {**self._blocks[index], "input": _object(text)}
        else:
            self._blocks[index] = {**self._blocks[index], self._field: text}
        self._field = ""
        self._emit("content_block_stop", index=index)

    def _emit(self, kind: str, **fields: object) -> None:
        if self._stream:
            self._events.append(_event(kind, encode({"type": kind, **fields})))


def _object(text: str) -> dict[str, Any]:
    """Decode a call's arguments; empty if the model was cut off or did not write a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _usage(summary: Summary) -> dict[str, int]:
    """Return the usage; Anthropic counts tokens read from a cache separately from the input."""
    return {
        "input_tokens": max(0, summary.prompt_tokens - summary.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
    }
