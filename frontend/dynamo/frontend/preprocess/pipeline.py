"""One model's text pipeline: a text request to token ids, and token ids back to text.

Where generation stops: the frontend adds the model's EOS tokens to `stop.token_ids` (unless `ignore_eos`), so an engine stops at
any of those ids and reports it in `Delta.stop_token`. Stop *strings* are matched by the `Detokenizer`, in the text.

How long a response may be: prompt and response share the model's context. `max_tokens` defaults to all that the prompt leaves,
and larger values are reduced to that, so that a client can set a large `max_tokens` without counting its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import GenerateRequest, Stop, pack_tokens, unpack_tokens
from dynamo.common.generation_rules import check_request
from dynamo.common.model_card import ModelCard
from dynamo.common.output_formats import GENERIC
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.checks import check_length, check_text_request, with_checked_content
from dynamo.frontend.preprocess.media.images import check_places, has_parts, read_images, read_parts, with_parts, with_places
from dynamo.frontend.preprocess.media.media import MediaUrls
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.plain import pack_conversation
from dynamo.frontend.preprocess.templates.budget import OutOfTime
from dynamo.frontend.preprocess.templates.shortening import fitting
from dynamo.frontend.preprocess.templates.template import ChatTemplate
from dynamo.frontend.preprocess.text import ContextExceeded, TextRequest
from dynamo.frontend.preprocess.tokens.detokenize import CONTEXT_TOKENS, Detokenizer
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer, TooManyTokens, out_of_vocabulary
from dynamo.frontend.preprocess.tools.prompt import in_plain_messages

MAX_PROMPT_LOGPROBS = 65_536
"""Log probabilities of all tokens of a prompt and their alternatives, at most; they come in one piece."""
_MAX_ARGUMENT_VALUES = 100_000
"""Values in the arguments of all tool calls in a conversation together, at most."""
_MANY_PARTS = 128
"""Conversations of more messages, content parts and tool calls are rendered in a thread, as are those that take more steps."""
_MANY_VALUES = 10_000
"""The same for values in tools and arguments of chat templates, of which a thousand take about half a millisecond."""
_FEW_STEPS = 8_192
_MANY_WORDS = 16
"""More bad words are tokenized in a thread."""
_CONTEXTS_TO_CUT = 16
"""How long a prompt that is to be truncated may be, in contexts of the model."""
_CONTINUE = "[goes on here]"
"""Marks the end of the message that the response continues, while the template is rendered."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
__all__ = ["Detokenizer", "TextPipeline", "Tokenizer"]


class TextPipeline:
    """The text pipeline of one model card, cheap to make of parts that models share. Requests may use it concurrently."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: TextLimits,
        offload: Offload,
        media: MediaUrls,
    ) -> None:
        assert card.llm is not None
        self._name = card.name
        self._info = card.llm
        self.tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._offload = offload
        self._media = media
        self._eos = card.llm.eos_token_ids
        if card.llm.eos_token and not self._eos and (eos := tokenizer.token_id(card.llm.eos_token)) is not None:
            self._eos = (eos,)
        self._max_chars = min(limits.max_prompt_chars, card.llm.context_length * tokenizer.longest_token_chars)

    def __repr__(self) -> str:
        return f"TextModel({self._name!r}, context_length={self._info.context_length})"

    @property
    def template_source(self) -> str:
        """The chat template as it was read; empty if the model has none."""
        return "" if self._template is None else self._template.source

    async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest:
        """Return `request` with its prompt in tokens, its `max_tokens` filled in and the EOS tokens added.

        `key` is the name of the caller's API key. Raises InvalidRequest, for example for a prompt that is too long for the model,
        and Overloaded or RateLimited if too many media are fetched.
        """
        if request.media:
            request = await self._media.inlined(request, self._info.modalities, key)
        check_text_request(request, self._info, self._limits)
        tokens = await self._tokens(request)
        has_media = self._info.modalities and (request.media or has_parts(request.messages or ()))
        media = await self._offload.run(_images, request, self._limits.max_image_pixels) if has_media else ()
        if media:
            check_places(tokens, len(media), self._info.image_token)
        conversation = await self._offload.run(self._pack_conversation, request) if media and self._info.renders_media else b""
        sampling = request.sampling
        if sampling.logit_bias:
            self._check_ids("logit_bias", sampling.logit_bias)
        if sampling.allowed_token_ids:
            self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        if request.logprob_token_ids:
            self._check_ids("logprob_token_ids", request.logprob_token_ids)
        if request.stop.token_ids:
            self._check_ids("stop_token_ids", request.stop.token_ids)
        for word in sampling.bad_words_token_ids or ():
            self._check_ids("bad_words_token_ids", word)
        if request.bad_words:
            own, is_long = self.tokenizer.own_thread, len(request.bad_words) > _MANY_WORDS
            words = await (own or self._offload).run_if(own is not None or is_long, self._bad_words, request.bad_words)
            sampling = msgspec.structs.replace(sampling, bad_words_token_ids=(*(sampling.bad_words_token_ids or ()), *words))
        entries = 0 if request.prompt_logprobs is None else len(tokens) * (1 + request.prompt_logprobs)
        if entries > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"the log probabilities of the prompt, {len(tokens)} tokens with {request.prompt_logprobs} alternatives each, "
                f"are {entries}; at most {MAX_PROMPT_LOGPROBS} are allowed",
                param="prompt_logprobs",
            )
        generate = GenerateRequest(
            model=request.model,
            prompt=pack_tokens(tokens),
            sampling=sampling,
            stop=self._stop(request.stop, len(tokens)),
            n=request.n,
            logprobs=request.logprobs,
            logprob_token_ids=request.logprob_token_ids,
            prompt_logprobs=request.prompt_logprobs,
            cache_salt=request.cache_salt,
            kv_transfer=request.kv_transfer,
            media=media,
            conversation=conversation,
        )
        check_request(generate)
        return generate

    def _pack_conversation(self, request: TextRequest) -> bytes:
        """Return a conversation with images for an engine that renders it itself. Raises InvalidRequest for what it cannot do."""
        settings = {
            "prompt": request.messages is None,
            "chat_template": bool(request.chat_template),
            "continue_final_message": request.continues_last,
            "add_generation_prompt": not request.add_generation_prompt,
            "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
            "thinking": request.reasoning_limit is not None,
        }
        for param, is_set in settings.items():
            if is_set:
                raise InvalidRequest(
                    f"'{param}' cannot be combined with images: the server of model '{self._name}' renders them itself",
                    param=param,
                )
        packed, _ = pack_conversation(
            request, request.messages or (), self._info, self._limits.max_image_pixels, plain_tools=False
        )
        return packed

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> Detokenizer:
        """Return a detokenizer for the response to `prompt`, which is `to_generate(request)`."""
        return Detokenizer(
            self.tokenizer,
            n=prompt.n,
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            eos_token_ids=frozenset(self._eos).difference(request.stop.token_ids),
            min_tokens=request.stop.min_tokens,
            prompt=unpack_tokens(prompt.prompt[-4 * CONTEXT_TOKENS :]) if self.tokenizer.pieces is None else (),
        )

    async def render(self, request: TextRequest) -> str:
        """Return the conversation of `request` rendered with the chat template, in a thread if that takes long.

        Raises InvalidRequest, and Overloaded if too many conversations are waiting for the thread.
        """
        if not request.chat_template and _is_short(request):
            with suppress(OutOfTime):
                return self._render(request, max_steps=_FEW_STEPS)
        return await self._offload.run(self._render, request)

    def _render(self, request: TextRequest, max_steps: int | None = None) -> str:
        template = self._template if not request.chat_template else self._own_template(request.chat_template)
        if template is None:
            raise InvalidRequest(f"model '{self._name}' has no chat template; send a prompt", param="messages")
        messages = request.messages or ()
        check_length(messages, self._limits)
        _check_arguments(messages)
        shaped = [_message(message, self._info.modalities) for message in messages]
        if request.continues_last:
            shaped[-1] = _with_marker(shaped[-1])
        tools: Sequence[Mapping[str, Any]] = list(map(_tool, request.tools))
        if self._info.tool_parser == GENERIC.name and not request.chat_template:
            shaped, tools = in_plain_messages(shaped, tools), ()
        elif (kind := PARSER_REGISTRY.tools.get(self._info.tool_parser)) is not None and kind.with_call_ids is not None:
            shaped = kind.with_call_ids(shaped)
        if self._info.modalities and template.takes_parts_only:
            shaped = list(map(with_parts, shaped))
        text = template.render(
            shaped,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt and not request.continues_last,
            variables=request.chat_template_kwargs,
            max_steps=max_steps,
        )
        if not request.continues_last:
            return text
        text, marker, _ = text.rpartition(_CONTINUE)
        if not marker:
            raise InvalidRequest(f"the chat template of model '{self._name}' cannot continue a message", param="messages")
        return text

    def _own_template(self, source: str) -> ChatTemplate:
        """Return the template that a request brings. Raises InvalidRequest."""
        bos, eos, most = self._info.bos_token, self._info.eos_token, self._limits.max_prompt_chars
        try:
            return ChatTemplate(source, bos_token=bos, eos_token=eos, max_chars=most)
        except EngineError as error:
            raise InvalidRequest(str(error), param="chat_template") from error

    async def _tokens(self, request: TextRequest) -> Sequence[int]:
        prompt = request.prompt
        cuts = request.truncate_prompt_tokens is not None
        if prompt is None:
            tokens = await self._conversation(request, cuts=cuts)
        elif isinstance(prompt, str):
            tokens = await self._encode(prompt, special_tokens=request.add_special_tokens is not False, cuts=cuts)
        else:
            tokens = prompt
            if not cuts and len(tokens) >= self._info.context_length:  # before each of them is checked
                raise self._no_room(len(tokens))
            if tokens:
                self.tokenizer.check_ids(tokens)
        if request.truncate_prompt_tokens is not None:
            tokens = self._truncated(tokens, request, request.truncate_prompt_tokens)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return tokens

    async def _conversation(self, request: TextRequest, *, cuts: bool) -> Sequence[int]:
        """Return the tokens of a conversation, shortened if the request wants that."""

        async def attempt(messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
            text = await self.render(msgspec.structs.replace(request, messages=messages))
            tokens = await self._encode(text, special_tokens=bool(request.add_special_tokens), cuts=cuts)
            if request.drops_messages:
                self._stop(request.stop, len(tokens))
            return tokens

        messages = request.messages or ()
        return await fitting(messages, attempt) if request.drops_messages and not request.media else await attempt(messages)

    def _truncated(self, tokens: Sequence[int], request: TextRequest, count: int) -> Sequence[int]:
        room = self._info.context_length - max(1, request.stop.max_tokens or 0)
        if count > room:
            raise InvalidRequest(
                f"'truncate_prompt_tokens' is {count}; the model's context of {self._info.context_length} tokens has room for "
                f"{max(0, room)} besides the response",
                param="truncate_prompt_tokens",
            )
        kept = max(0, room) if count == -1 else count
        return tokens[:kept] if request.truncates_end else tokens[max(0, len(tokens) - kept) :]

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each word at the beginning of a text and, where they differ, after a space."""
        result: list[tuple[int, ...]] = []
        for word in words:
            first = tuple(self.tokenizer.encode_now(word.lstrip(), special_tokens=False))
            after_space = tuple(self.tokenizer.encode_now(" " + word.lstrip(), special_tokens=False))
            if first:
                result.append(first)
            if after_space[:1] != first[:1] and len(after_space) == len(first):
                result.append(after_space)
        return result

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        """Raises InvalidRequest for a token id that is not in the vocabulary."""
        size = self.tokenizer.vocabulary_size
        if ids and not 0 <= max(ids) < size:
            raise out_of_vocabulary(name, max(ids), size)

    async def _encode(self, text: str, *, special_tokens: bool, cuts: bool = False) -> Sequence[int]:
        most_chars = self._limits.max_prompt_chars if cuts else self._max_chars
        if len(text) > most_chars:
            raise ContextExceeded(
                f"prompt is too long: {len(text)} characters > {most_chars} maximum; {self._context}", param="prompt"
            )
        try:
            most = self._info.context_length * (_CONTEXTS_TO_CUT if cuts else 1)
            return await self.tokenizer.encode_prompt(text, special_tokens=special_tokens, max_tokens=most)
        except TooManyTokens as error:
            raise self._no_room(error.count) from None

    @property
    def _context(self) -> str:
        """The end of messages about long prompts. Clients that compact or choose a larger model look for these words."""
        return f"this model's maximum context length is {self._info.context_length} tokens"

    def _no_room(self, prompt_tokens: int) -> ContextExceeded:
        return ContextExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {self._info.context_length - 1} maximum; {self._context}",
            param="prompt",
        )

    def _stop(self, stop: Stop, prompt_tokens: int) -> Stop:
        """Return `stop` with its `max_tokens` and EOS tokens. Raises ContextExceeded without room for the response."""
        room = self._info.context_length - prompt_tokens
        if room < 1:
            raise self._no_room(prompt_tokens)
        max_tokens = room if stop.max_tokens is None else stop.max_tokens
        if max_tokens > room:
            raise ContextExceeded(
                f"'max_tokens' is {max_tokens}, but the prompt's {prompt_tokens} tokens leave room for {room}; {self._context}",
                param="max_tokens",
            )
        if stop.max_tokens is None and stop.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {stop.min_tokens}, but the prompt's {prompt_tokens} tokens leave room for {room}; "
                f"{self._context}",
                param="min_tokens",
            )
        if stop.ignore_eos:
            return msgspec.structs.replace(stop, max_tokens=max_tokens)
        ids = tuple(dict.fromkeys((*stop.token_ids, *self._eos)))
        return msgspec.structs.replace(stop, max_tokens=max_tokens, token_ids=ids)


def _message(message: Mapping[str, Any], modalities: Collection[str]) -> dict[str, Any]:
    """Return `message` in the shape that templates expect: content of a text-only model is one string, arguments are objects."""
    result = with_checked_content(message, modalities)
    if modalities:
        result = with_places(result)
    reasoning = result.get("reasoning_content") or result.get("reasoning")
    if reasoning:
        result["reasoning_content"] = reasoning  # where most templates read it
    if result.get("content") is None:  # a message of calls alone: templates add it to text
        result["content"] = ""
    if isinstance(calls := result.get("tool_calls"), list | tuple):
        result["tool_calls"] = [_tool_call(call) for call in calls]
        if reasoning and not result["content"]:
            result["thinking"] = reasoning  # gpt-oss reads it there, and only before calls
    return result


def _images(request: TextRequest, max_pixels: int) -> tuple[dict[str, Any], ...]:
    return read_parts(request.media, max_pixels) if request.messages is None else read_images(request.messages, max_pixels)


def _with_marker(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with a marker at the end of its text, to find that place in the rendered prompt."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str) or not content.strip():
        raise InvalidRequest("only a last message that is a text of the assistant can be continued", param="messages")
    return {**message, "content": content.rstrip() + _CONTINUE}


def _is_short(request: TextRequest) -> bool:
    messages = request.messages or ()
    if len(messages) > _MANY_PARTS:
        return False
    parts = len(messages)
    for message in messages:
        for name in ("content", "tool_calls") if isinstance(message, Mapping) else ():
            value = message.get(name)
            parts += len(value) if isinstance(value, list | tuple) else 0
    return parts <= _MANY_PARTS and _has_few_values([*request.tools, *request.chat_template_kwargs.values()])


def _has_few_values(values: list[Any]) -> bool:
    """Return whether these values of JSON, and what is in them, are few, without looking at all of many."""
    count = 0
    while values:
        inner: list[Any] = []
        for value in values:
            if value.__class__ is dict:
                inner += value.values()
            elif value.__class__ is list:
                inner += value
        count += len(inner)
        if count > _MANY_VALUES:
            return False
        values = inner
    return True


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Bound what `_tool_call` builds from JSON that is inside of strings; raise InvalidRequest."""
    values = 0
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                values += sum(map(arguments.count, "[{,:"))
    if values > _MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"the arguments of tool calls have {values} values; at most {_MAX_ARGUMENT_VALUES} are allowed", param="messages"
        )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with parameters: a function may leave them out, but templates read them."""
    function = tool["function"]
    return tool if function.get("parameters") else {**tool, "function": {**function, "parameters": _NO_PARAMETERS}}


def _tool_call(call: object) -> object:
    """Parse the arguments of a call: OpenAI clients send them as JSON text, templates expect an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # written by a model, so not necessarily JSON
    return {**call, "function": {**function, "arguments": arguments}}
