"""POST …/generate and …/generate_stream: one JSON object, or server-sent events of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.process.background import awaited
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.tensors import element_count
from dynamo.frontend.api.http.event_stream import EventStream
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import JsonArray, Spliced
from dynamo.frontend.api.kserve.infer import gather_text, infer, infer_stream, serve
from dynamo.frontend.api.kserve.rest.generate_requests import RestGenerateRequest, read_generate
from dynamo.frontend.api.kserve.rest.infer import begin
from dynamo.frontend.api.kserve.rest.long_arrays import SHORT_BYTES
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.responses import ModelResponse, parameters_to_json, send_response, write_elements
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.text import to_text_requests
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation
from dynamo.frontend.serving.model_catalog import NamedModel


async def handle_generate(plane: DataPlane, server: KserveServer, exchange: Exchange, target: ModelPath) -> None:
    parsed, call = await _read(plane, exchange, target)
    if parsed.stream:
        raise InvalidRequest("generate returns one response; omit 'stream', or use generate_stream", param="stream")

    async def respond(model: NamedModel, call: Call) -> list[bytes]:
        named = replace(parsed, request=parsed.request.renamed(model.name))
        call = begin(server, exchange, call, named.request, model, RequestType.UNARY)
        async with exchange.attended():
            return await _single_response(plane, exchange, named, model, call)

    await send_response(exchange, await serve(plane, call, parsed.request, respond), [])


async def handle_generate_stream(plane: DataPlane, server: KserveServer, exchange: Exchange, target: ModelPath) -> None:
    parsed, call = await _read(plane, exchange, target)

    def respond(model: NamedModel, call: Call) -> Awaitable[None]:
        named = replace(parsed, request=parsed.request.renamed(model.name))
        call = begin(server, exchange, call, named.request, model, RequestType.STREAM)
        return _respond_with_events(plane, exchange, named, model, call)

    await serve(plane, call, parsed.request, respond, exchange.has_begun)


async def _respond_with_events(
    plane: DataPlane, exchange: Exchange, parsed: RestGenerateRequest, model: NamedModel, call: Call
) -> None:
    async with exchange.attended(), exchange.events() as stream:
        if model.card.kind is ModelKind.LLM and parsed.stream is not False:
            await _stream_text(plane, parsed, model, call, stream)
        elif model.card.decoupled:
            async with infer_stream(plane, model, parsed.request, call) as responses:
                while batch := await responses.read():
                    await _write_batch(exchange, stream, [*map(ModelResponse.parse, batch)])
        else:
            await stream.write_pieces(_event(await _single_response(plane, exchange, parsed, model, call)))
        await stream.end(b"")


async def _write_batch(exchange: Exchange, stream: EventStream, batch: Sequence[ModelResponse]) -> None:
    """Write the responses of a decoupled model that have outputs; their JSON counts until they are written."""
    with exchange.holding() as hold:
        events: list[bytes] = []
        for response in batch:
            if response.head.outputs:
                events += _event(await _to_json(exchange, response, hold))
        if events:
            await stream.write_pieces(events)


async def _read(plane: DataPlane, exchange: Exchange, target: ModelPath) -> tuple[RestGenerateRequest, Call]:
    call = exchange.call(has_own_id=True)
    body = await exchange.decompressed_body()
    card = plane.described(exchange.account, target.model, target.version)
    reading = read_generate(body, card, target.model, target.version, exchange.settings.options)
    async with exchange.attended():
        return finish(reading) if len(body) <= SHORT_BYTES else await exchange.in_steps(reading), call


def _event(text: Sequence[bytes]) -> list[bytes]:
    return [b"data: " + text[0], *text[1:-1], text[-1] + b"\n\n"] if len(text) > 1 else [b"data: " + text[0] + b"\n\n"]


async def _single_response(
    plane: DataPlane, exchange: Exchange, parsed: RestGenerateRequest, model: NamedModel, call: Call
) -> list[bytes]:
    """Return the pieces of the response as JSON."""
    if model.card.kind is ModelKind.LLM:
        return await _all_text(plane, parsed, model, call)
    if not model.card.decoupled:
        return await _to_json(exchange, ModelResponse.parse(await infer(plane, model, parsed.request, call)), exchange.hold)
    results: list[ModelResponse] = []
    async with infer_stream(plane, model, parsed.request, call) as responses:
        while len(results) < 2 and (batch := await responses.read()):
            results += [response for response in map(ModelResponse.parse, batch) if response.head.outputs]
    if len(results) != 1:
        name, times = model.card.name, "more" if results else "none"
        raise InvalidRequest(
            f"generate expects model '{name}' to produce exactly 1 response, but it produced {times}; use generate_stream"
        )
    return await _to_json(exchange, results[0], exchange.hold)


async def _to_json(exchange: Exchange, response: ModelResponse, hold: Callable[[int], None]) -> list[bytes]:
    size = sum(map(len, response.raws))
    if size <= SHORT_BYTES:
        return finish(_write(response))
    hold(size)
    return await exchange.settings.steps.run(_write(response, Spliced()), hold)


def _write(response: ModelResponse, long: Spliced | None = None) -> Work[list[bytes]]:
    """Return every output under its own name: a single element as a scalar, others as a flat array.

    A response above `SHORT_BYTES` is put together in `long`.
    """
    fields: dict[str, Any] = response.fields()
    for key, value in parameters_to_json(response.head.parameters).items():
        if key != "triton_final_response":
            fields.setdefault(key, value)
    for output, raw in zip(response.head.outputs, response.raws, strict=True):
        as_scalar = element_count(output.shape) == 1
        fields[output.name] = yield from write_elements(output, raw, long, as_scalar=as_scalar)
    text = orjson.dumps(fields)
    return [text] if long is None else long.pieces(text)


# Language models


async def _all_text(plane: DataPlane, parsed: RestGenerateRequest, model: NamedModel, call: Call) -> list[bytes]:
    texts = to_text_requests(parsed.request, model.card)
    writer = await _writer(plane, call.account, parsed, model.card, texts)
    n = texts[0].n
    choices = [writer.choice() for _ in range(len(texts) * n)]

    def add(prompt: int, deltas: Sequence[TextDelta]) -> None:
        for delta in deltas:
            choices[prompt * n + delta.index].add(delta)

    await gather_text(plane, model, texts, call, add)
    return writer.whole(choices)


async def _stream_text(plane: DataPlane, parsed: RestGenerateRequest, model: NamedModel, call: Call, stream: EventStream) -> None:
    texts = to_text_requests(parsed.request, model.card)
    if len(texts) * texts[0].n != 1:
        raise InvalidRequest("generate_stream streams one choice of one prompt; send several requests, or use generate")
    writer = await _writer(plane, call.account, parsed, model.card, texts)
    async with plane.generate(model, texts[0], call) as generation:
        # In a task of its own: a token wakes that one, and not each of the coroutines that wait for the end of the stream.
        await awaited(_write_texts(generation, writer, stream))


async def _write_texts(generation: Generation, writer: _TextWriter, stream: EventStream) -> None:
    while deltas := await generation.read():
        if events := b"".join(map(writer.event, deltas)):
            await stream.write(events)


async def _writer(
    plane: DataPlane, account: Account, parsed: RestGenerateRequest, card: ModelCard, texts: Sequence[TextRequest]
) -> _TextWriter:
    tokens = None
    if texts[0].logprobs is not None:
        tokens = TokenTexts((await plane.text_model(account, card.name)).tokenizer)
    return _TextWriter(parsed, card, tokens)


class _TextWriter:
    """Serializes generated text. What is the same in all events is encoded once."""

    def __init__(self, parsed: RestGenerateRequest, card: ModelCard, tokens: TokenTexts | None) -> None:
        head = parsed.request.head
        self._fields: dict[str, Any] = {"id": head.id} if head.id else {}
        self._fields["model_name"] = head.model_name
        self._fields["model_version"] = head.model_version or card.versions[-1]
        self._details = parsed.details
        self._tokens = tokens
        self._plain = b"data: " + orjson.dumps(self._fields)[:-1] + b',"text_output":'

    def choice(self) -> GeneratedChoice:
        """Return a choice of a whole response, without text yet."""
        return GeneratedChoice(self._tokens if self._details else None)

    def whole(self, choices: Sequence[GeneratedChoice]) -> list[bytes]:
        """Return the pieces of the response; `text_output` and `details` are arrays if there are several choices."""
        texts = ["".join(choice.texts) for choice in choices]
        fields = self._fields | {"text_output": texts[0] if len(texts) == 1 else texts}
        long = Spliced()
        if self._details:
            details = [choice.details(long) for choice in choices]
            fields["details"] = details[0] if len(details) == 1 else details
        return long.pieces(orjson.dumps(fields))

    def event(self, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if the delta adds nothing to it."""
        if not delta.text and delta.finish_reason is None and not (self._tokens is not None and delta.logprobs):
            return b""
        if not self._details:
            return self._plain + orjson.dumps(delta.text) + b"}\n\n"
        choice = self.choice()
        choice.add(delta)
        long = Spliced()
        event = orjson.dumps(self._fields | {"text_output": delta.text, "details": choice.details(long)})
        return b"".join((b"data: ", *long.pieces(event), b"\n\n"))


class GeneratedChoice:
    """Collects the text and the details of a choice."""

    __slots__ = ("_last", "_logprobs", "_tokens", "texts")

    def __init__(self, tokens: TokenTexts | None) -> None:
        """`tokens`: for log probabilities, if details have them."""
        self.texts: list[str] = []
        self._last: TextDelta | None = None
        self._tokens = tokens
        self._logprobs = JsonArray()

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self._last = delta
        tokens = self._tokens
        if tokens is not None and delta.logprobs:
            chosen = [position[0] for position in delta.logprobs if position]
            shown = [
                {"id": token, "text": tokens[token], "logprob": logprob, "special": tokens.is_special(token)}
                for token, logprob in chosen
            ]
            self._logprobs.extend(orjson.dumps(shown))

    def details(self, long: Spliced) -> dict[str, Any]:
        """Return the details, with what stands for log probabilities that are long."""
        details: dict[str, Any] = {}
        if self._last is not None and self._last.finish_reason is not None:
            details["finish_reason"] = _reason(self._last)
        if self._tokens is not None:
            details["logprobs"] = orjson.Fragment(long.put(self._logprobs))
        return details


def _reason(last: TextDelta) -> str:
    """Return the finish reason of a choice, by its name in the Open Inference Protocol if it has one."""
    if last.finish_reason is FinishReason.STOP:
        return "eos_token" if last.stop_reason is None else "stop_sequence"
    return str(last.finish_reason)
