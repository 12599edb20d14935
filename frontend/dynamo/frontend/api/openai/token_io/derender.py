"""POST /v1/chat/completions/derender and /v1/completions/derender: what /inference/v1/generate responded, to whole responses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chat import ChatChoiceBuilder
from dynamo.frontend.api.openai.chunks import Details, encode
from dynamo.frontend.api.openai.completions import CompletionChoiceBuilder
from dynamo.frontend.api.openai.custom_tools import custom_names
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import ChatRequest
from dynamo.frontend.api.openai.response_objects import ChatCompletion, Completion, CompletionChoice, Usage
from dynamo.frontend.api.openai.to_text import chat_to_text, renamed, with_tools
from dynamo.frontend.api.openai.token_io.objects import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChoice,
    DerenderedLogprobs,
    DerenderedResponse,
)
from dynamo.frontend.api.text.model_names import described_model
from dynamo.frontend.api.text.rules import llm_of
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.parsers import OutputParser, ParserKind, make_parser
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.serving.text.text_models import TextModel, Vocabulary

_END_TOKENS = 16
_END_CHARS = 256
_MANY = 256
_MAX_TOKENS = 1 << 20


class DerenderChat:
    """The endpoint for chat completions. With `chat_request` reasoning and calls are parsed as in a response to that."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(DerenderChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        exchange.call()
        request = await self._reader.read(exchange)
        chat = None if request.chat_request is None else with_tools(request.chat_request)
        name = request.model or (None if chat is None else chat.model)
        model = described_model(edge.plane, exchange.account, name)
        card = edge.plane.card(exchange.account, model)
        text = await _text_model(edge, exchange, card)
        response = request.generate_response
        _check_choices([response], edge.limits.max_choices)
        prompt = request.prompt_token_ids or response.prompt_token_ids or ()
        parsing = _Parsing()
        if chat is not None:
            edge.check_template(chat.chat_template)
            parsing = await self._parsing(exchange, renamed(chat, model), card, text, prompt)
        choices = []
        texts = TokenTexts(text.tokenizer)
        for each in response.choices:
            delta = await _delta(
                edge.offload, text.tokenizer, llm_of(card), each, skip_special_tokens=parsing.skip_special_tokens
            )
            details = Details(
                texts=texts if delta.logprobs is not None else None,
                alternatives=max(map(len, delta.logprobs or ()), default=1) - 1,
                has_functions=chat is not None and chat.functions is not None,
                partial_calls=True,
                custom_tools=frozenset() if chat is None else custom_names(chat),
            )
            builder = ChatChoiceBuilder(parsing.make(), details)
            choices.append(await edge.offload.run_if(len(delta.tokens) > _MANY, _chat_choice, builder, delta, each.index))
        await exchange.respond(
            encode(
                ChatCompletion(
                    id=f"chatcmpl-{exchange.request_id}",
                    created=int(edge.clock()),
                    model=model,
                    choices=choices,
                    usage=_usage(request.prompt_tokens or len(prompt), [response]),
                )
            )
        )

    async def _parsing(
        self, exchange: Exchange, chat: ChatRequest, card: ModelCard, text: TextModel, prompt: Sequence[int]
    ) -> _Parsing:
        edge = self._edge
        prepared = await edge.offload.run_if(exchange.has_large_body, chat_to_text, chat, card, edge.parsers, edge.limits)
        first = prepared.texts[0]
        if prompt:
            end = text.tokenizer.decode([*prompt[-_END_TOKENS:]], skip_special_tokens=False)
        else:
            end = (await text.render(first))[-_END_CHARS:] if first.messages is not None else ""
        return _Parsing(prepared.parsers, prepared.tools, end, first.skip_special_tokens)


class _Parsing(msgspec.Struct, frozen=True):
    """How the text of a response is parsed; without parsers all of it is content."""

    kinds: tuple[ParserKind, ...] = ()
    tools: Sequence[object] = ()
    prompt_end: str = ""
    skip_special_tokens: bool = True

    def make(self) -> OutputParser | None:
        return make_parser(self.kinds, self.tools, self.prompt_end) if self.kinds else None  # type: ignore[arg-type]


def _chat_choice(builder: ChatChoiceBuilder, delta: TextDelta, index: int) -> Raw:
    long = Spliced()
    builder.add(delta)
    return Raw(b"".join(long.pieces(encode(builder.choice(long, index)))))


class DerenderCompletion:
    """The endpoint for plain completions: one response of /inference/v1/generate for each prompt."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(DerenderCompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        exchange.call()
        request = await self._reader.read(exchange)
        completion, responses = request.completion_request, request.generate_responses
        _check_choices(responses, edge.limits.max_choices)
        for name, values in (("prompt_tokens", request.prompt_tokens), ("prompt_token_ids", request.prompt_token_ids)):
            if values is not None and len(values) != len(responses):
                raise InvalidRequest(f"'{name}' has {len(values)} entries for {len(responses)} responses", param=name)
        named = request.model or (None if completion is None else completion.model)
        model = described_model(edge.plane, exchange.account, named)
        card = edge.plane.card(exchange.account, model)
        text = await _text_model(edge, exchange, card)
        skips = completion is None or completion.skip_special_tokens is not False
        choices: list[Raw] = []
        for response in responses:
            for each in response.choices:
                delta = await _delta(edge.offload, text.tokenizer, llm_of(card), each, skip_special_tokens=skips)
                builder = CompletionChoiceBuilder(max(map(len, delta.logprobs or ()), default=1) - 1)
                builder.add(delta)
                texts = None if delta.logprobs is None else TokenTexts(text.tokenizer)
                is_long = len(delta.tokens) > _MANY
                choices.append(await edge.offload.run_if(is_long, _completion_choice, builder, texts, len(choices)))
        await exchange.respond(
            encode(
                Completion(
                    id=f"cmpl-{exchange.request_id}",
                    created=int(edge.clock()),
                    model=model,
                    choices=choices,
                    usage=_usage(sum(request.prompt_tokens or ()), responses),
                )
            )
        )


def _completion_choice(builder: CompletionChoiceBuilder, texts: TokenTexts | None, index: int) -> Raw:
    long = Spliced()
    choice: CompletionChoice = builder.bare_choice(long, index, texts)
    return Raw(b"".join(long.pieces(encode(choice))))


async def _text_model(edge: Edge, exchange: Exchange, card: ModelCard) -> TextModel:
    if llm_of(card).takes_text:
        raise InvalidRequest(f"model '{card.name}' takes text and no tokens", param="model")
    return await edge.plane.text_model(exchange.account, card.name)


async def _delta(
    offload: Offload, vocabulary: Vocabulary, llm: LlmInfo, choice: DerenderedChoice, *, skip_special_tokens: bool
) -> TextDelta:
    """Return all of a choice as one delta, without the token by which the model ended. Raises InvalidRequest."""
    tokens = choice.token_ids or []
    if len(tokens) > _MAX_TOKENS:
        raise InvalidRequest(f"a choice has {len(tokens)} tokens; at most {_MAX_TOKENS} are allowed", param="token_ids")
    if tokens:
        vocabulary.check_ids(tokens, "token_ids")
    has_end = bool(tokens) and _is_end(vocabulary, llm, tokens[-1])
    kept = tokens[:-1] if has_end else tokens
    logprobs = None
    if choice.logprobs is not None:
        logprobs = await offload.run_if(len(choice.logprobs.content or ()) > _MANY, _positions, choice.logprobs, vocabulary)
    return TextDelta(
        index=0,
        text=await vocabulary.decode_prompt(kept, skip_special_tokens=skip_special_tokens) if kept else "",
        tokens=tuple(kept),
        finish_reason=_reason(choice.finish_reason),
        logprobs=logprobs,
        stop_reason=choice.stop_reason,
        stop_token=tokens[-1] if has_end else None,
    )


def _positions(logprobs: DerenderedLogprobs, vocabulary: Vocabulary) -> list[list[tuple[int, float]]] | None:
    positions = logprobs.positions()
    if positions:
        vocabulary.check_ids([token for position in positions for token, _ in position], "logprobs")
    return positions


def _check_choices(responses: Sequence[DerenderedResponse], most: int) -> None:
    count = sum(len(response.choices) for response in responses)
    if count > most:
        raise InvalidRequest(f"got {count} choices; at most {most} are allowed", param="choices")


def _is_end(vocabulary: Vocabulary, llm: LlmInfo, token: int) -> bool:
    """Return whether the model ends its responses with this token."""
    if llm.eos_token_ids:
        return token in llm.eos_token_ids
    return bool(llm.eos_token) and vocabulary.decode([token], skip_special_tokens=False) == llm.eos_token


def _reason(name: str | None) -> FinishReason:
    return FinishReason(name) if name in set(FinishReason) else FinishReason.STOP


def _usage(prompt_tokens: int, responses: Sequence[DerenderedResponse]) -> Usage:
    made = sum(len(choice.token_ids or ()) for response in responses for choice in response.choices)
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=made, total_tokens=prompt_tokens + made)
