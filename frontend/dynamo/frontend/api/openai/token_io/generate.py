"""POST /inference/v1/generate: continue tokens, and return tokens. No chat template and no parser takes part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Raw

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import JsonArray, Spliced
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import DONE, encode, token_ids
from dynamo.frontend.api.openai.edge import Edge, write_stream
from dynamo.frontend.api.openai.field_names import fields_named
from dynamo.frontend.api.openai.logprobs import MANY_POSITIONS, Positions, encoded_prompt_logprobs
from dynamo.frontend.api.openai.response_objects import Usage
from dynamo.frontend.api.openai.to_text import call_of, completion_to_text
from dynamo.frontend.api.openai.token_io.objects import (
    TokenChoice,
    TokenIdLogprob,
    TokensRequest,
    TokensResponse,
)
from dynamo.frontend.api.openai.whole import WholeResponse
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.rules import llm_of
from dynamo.frontend.api.text.token_texts import TokenTexts, best_first
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import Generation
from dynamo.frontend.serving.model_catalog import NamedModel

_FIELDS = {"prompt": "token_ids"}
_SAMPLING = ("n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "stop", "logit_bias", "structured_outputs")
"""Fields that checks name, which are those of `sampling_params` here."""


class GenerateTokens:
    """The endpoint, streamed or whole."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(TokensRequest)
        self._names = _FIELDS | {name: f"sampling_params.{name}" for name in _SAMPLING}

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        started = edge.clock()
        call = exchange.call()
        request = await self._reader.read(exchange)
        if request.kv_transfer_params is not None and not edge.trusts_kv_transfers:
            raise InvalidRequest(
                "requests may not arrange transfers of KV caches: the server runs without --trust-kv-transfer-params",
                param="kv_transfer_params",
            )
        name = name_or_only_model(edge.plane, exchange.account, request.model)
        with fields_named(self._names):
            call = call_of(request.to_completion(name), exchange.identified(call, request.request_id))
            serve = partial(self._serve, exchange, request, int(started))
            await edge.plane.names.serve(call, name, serve, has_begun=exchange.has_begun)

    async def _serve(self, exchange: Exchange, request: TokensRequest, created: int, model: NamedModel, call: Call) -> None:
        edge = self._edge
        if llm_of(model.card).takes_text:
            raise InvalidRequest(f"model '{model.name}' takes text and no tokens", param="model")
        completion = request.to_completion(model.name)
        prepared = completion_to_text(completion, model.card, edge.limits)
        text = msgspec.structs.replace(
            prepared.texts[0],
            stop=msgspec.structs.replace(prepared.texts[0].stop, max_tokens=request.sampling_params.max_tokens),
            kv_transfer=request.kv_transfer_params,
        )
        texts = None
        if text.logprobs is not None or text.prompt_logprobs is not None:
            vocabulary = (await edge.plane.text_model(exchange.account, model.name)).tokenizer
            texts = TokenTexts(vocabulary, as_ids=not request.wants_text)
        generation = edge.plane.generate(model, text, call)
        form = _Form(texts if text.logprobs is not None else None, text.logprobs or 0, request.wants_text)
        async with exchange.attended(), generation:
            if request.stream:
                await self._stream(exchange, request, generation, form)
            else:
                await self._respond(exchange, request, generation, form, texts, created, model.name)

    async def _stream(self, exchange: Exchange, request: TokensRequest, generation: Generation, form: _Form) -> None:
        chunks = _TokenChunks(exchange.request_id, generation, form, with_prompt=bool(request.return_token_ids))
        async with exchange.events() as stream:
            await write_stream(stream, generation, chunks)
            last = DONE
            if request.stream_options is not None and request.stream_options.include_usage:
                last = chunks.usage(Usage.of(generation.summary)) + DONE
            await stream.end(last)

    async def _respond(
        self,
        exchange: Exchange,
        request: TokensRequest,
        generation: Generation,
        form: _Form,
        texts: TokenTexts | None,
        created: int,
        model: str,
    ) -> None:
        builders = [_ChoiceBuilder(form) for _ in range(request.sampling_params.n or 1)]
        gathering = Gathering(exchange.hold)
        while deltas := await generation.read():
            gathering.add(deltas)
            for delta in deltas:
                builders[delta.index].add(delta)
        whole = WholeResponse(exchange, self._edge.offload)
        for builder in builders:
            await whole.add(builder.is_long, builder.choice)
        of_prompt = None
        if request.sampling_params.prompt_logprobs is not None and texts is not None:
            positions = generation.summary.prompt_logprobs or []
            gathering.add_prompt(positions)
            is_long = len(positions) > MANY_POSITIONS
            of_prompt = await self._edge.offload.run_if(is_long, _of_prompt, positions, texts)
        await whole.send(
            lambda choices: TokensResponse(
                request_id=exchange.request_id,
                model=model,
                created=created,
                output_mode="text" if request.wants_text else "tokens",
                choices=choices,
                usage=Usage.of(generation.summary),
                prompt_logprobs=of_prompt,
                prompt_token_ids=[*generation.prompt_ids] if request.return_token_ids else None,
                kv_transfer_params=generation.summary.kv_transfer if request.kv_transfer_params is not None else None,
            )
        )


def _of_prompt(positions: Sequence[Sequence[tuple[int, float]] | None], texts: TokenTexts) -> Raw:
    long = Spliced()
    return Raw(b"".join(long.pieces(bytes(encoded_prompt_logprobs(positions, texts, long)))))


class _Form(msgspec.Struct, frozen=True):
    """Which parts each choice has in addition to its tokens."""

    texts: TokenTexts | None
    """For log probabilities; None: there are none."""
    alternatives: int
    has_text: bool

    def logprobs(self, positions: Positions | None) -> bytes:
        """Return the log probabilities of some tokens as a JSON array."""
        texts = self.texts
        if texts is None or not positions:
            return b"[]"
        return encode(
            [
                msgspec.structs.replace(
                    self._one(texts, *position[0]),
                    top_logprobs=[self._one(texts, *other) for other in best_first(position, self.alternatives)],
                )
                for position in positions
            ]
        )

    def _one(self, texts: TokenTexts, token: int, logprob: float) -> TokenIdLogprob:
        shown = texts.bytes_of(token) if self.has_text else None
        return TokenIdLogprob(token_id=token, token=texts[token], logprob=logprob, bytes=shown)


class _TokenChunks:
    """Turns deltas into events."""

    def __init__(self, request_id: str, generation: Generation, form: _Form, *, with_prompt: bool) -> None:
        self._start = b'data: {"request_id":' + encode(request_id)
        if form.has_text:
            self._start += b',"output_mode":"text"'
        self._form = form
        self._prompt = b',"prompt_token_ids":' + encode(list(generation.prompt_ids)) if with_prompt else b""

    def add(self, deltas: Sequence[TextDelta], events: list[bytes]) -> None:
        for delta in deltas:
            logprobs = None
            if self._form.texts is not None:
                logprobs = Raw(b'{"content":' + self._form.logprobs(delta.logprobs) + b"}")
            choice = TokenChoice(
                index=delta.index,
                token_ids=token_ids(delta),
                text=delta.text if self._form.has_text else UNSET,
                logprobs=logprobs,
                finish_reason=None if delta.finish_reason is None else str(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
            events += (self._start, self._prompt, b',"choices":[', encode(choice), b"]}\n\n")
            self._prompt = b""

    def usage(self, usage: Usage) -> bytes:
        return self._start + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"


class _ChoiceBuilder:
    """Builds one choice of a whole response from its deltas."""

    def __init__(self, form: _Form) -> None:
        self._form = form
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs = JsonArray()
        self._reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def is_long(self) -> bool:
        """Whether to encode the choice takes longer than an event loop has time for."""
        return len(self._ids) > MANY_POSITIONS * 16

    def add(self, delta: TextDelta) -> None:
        self._ids += token_ids(delta)
        if self._form.has_text:
            self._texts.append(delta.text)
        if self._form.texts is not None:
            self._logprobs.extend(self._form.logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            self._reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    def choice(self, long: Spliced, index: int) -> TokenChoice:
        """Return the choice. Raises EngineError if the engine did not finish it."""
        if self._reason is None:
            raise EngineError("the engine ended without finishing its response")
        logprobs = None if self._form.texts is None else Raw(b'{"content":' + long.put(self._logprobs) + b"}")
        return TokenChoice(
            index=index,
            token_ids=self._ids,
            text="".join(self._texts) if self._form.has_text else UNSET,
            logprobs=logprobs,
            finish_reason=str(self._reason),
            stop_reason=self._stop_reason,
        )
