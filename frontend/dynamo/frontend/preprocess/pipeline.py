"""One model's text side: from a request in text to token ids, and from token ids back to text.

Who ends an answer: the frontend puts the model's EOS tokens into `stop.token_ids` (unless `ignore_eos`), so an engine ends at
any of those ids and says at which in `Delta.stop_token`. Stop *strings* are found by the `Detokenizer`, in the text.

How long an answer may be: prompt and answer share the model's context. `max_tokens` is by default all that the prompt leaves,
and what a request asks for beyond that is cut down to it, so that a client can ask for "much" without counting its prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import GenerateRequest, Stop, pack_tokens, unpack_tokens
from dynamo.common.generation_rules import check_request
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.detokenize import CONTEXT_TOKENS, Detokenizer
from dynamo.frontend.preprocess.template import ChatTemplate
from dynamo.frontend.preprocess.text import ContextExceeded, TextRequest
from dynamo.frontend.preprocess.tokenizer import Tokenizer

_MAX_STOP_STRING_CHARS = 1024
_MANY_MESSAGES = 32
"""Longer conversations are rendered in a thread."""
_CONTINUE = "[goes on here]"
"""Stands for the end of a message that is to be continued, while the template is rendered."""
_MODALITIES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""What a model must take for content parts of these types."""

__all__ = ["Detokenizer", "FileReader", "TextModel", "load_text_model"]


class FileReader(Protocol):
    """Where the files are that cards name."""

    async def get(self, key: str) -> bytes:
        """The contents of the file with this sha256 (hexadecimal)."""
        ...


async def load_text_model(
    card: ModelCard, store: FileReader, limits: TextLimits | None = None, *, fast_tokenizer: bool = True
) -> TextModel:
    """Reads the card's tokenizer and chat template. Raises EngineError if they are not what they should be.

    `fast_tokenizer` is `fast` of `Tokenizer`.
    """
    info = card.llm
    if info is None:
        raise InvalidRequest(f"model '{card.name}' is no language model")
    limits = limits or TextLimits()
    files = [await store.get(key) if key else b"" for key in (info.tokenizer, info.chat_template)]

    def read() -> tuple[Tokenizer, ChatTemplate | None]:
        tokenizer = Tokenizer(files[0], bos_token=info.bos_token, add_bos=info.add_bos, fast=fast_tokenizer)
        return tokenizer, _template(files[1], info, limits) if files[1] else None

    tokenizer, template = await asyncio.to_thread(read)
    return TextModel(card, tokenizer, template, limits)


class TextModel:
    """One per model card. May be used by any number of requests at once."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, limits: TextLimits) -> None:
        assert card.llm is not None
        self._name = card.name
        self._info = card.llm
        self.tokenizer = tokenizer
        self._template = template
        self._limits = limits
        eos = tokenizer.token_id(card.llm.eos_token) if card.llm.eos_token else None
        self._eos = card.llm.eos_token_ids or (() if eos is None else (eos,))
        self._max_chars = min(limits.max_prompt_chars, card.llm.context_length * tokenizer.longest_token_chars)

    async def to_generate(self, request: TextRequest) -> GenerateRequest:
        """`request` with its prompt in tokens, its `max_tokens` filled in and its EOS tokens named.

        Raises InvalidRequest for whatever is wrong with it, such as a prompt that is too long for the model.
        """
        self._check(request)
        tokens = await self._tokens(request)
        generate = GenerateRequest(
            model=request.model,
            prompt=pack_tokens(tokens),
            sampling=request.sampling,
            stop=self._stop(request.stop, len(tokens)),
            n=request.n,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            cache_salt=request.cache_salt,
            media=request.media,
        )
        check_request(generate)
        return generate

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> Detokenizer:
        """Turns the answer to `prompt`, which `to_generate(request)` made, into text."""
        return Detokenizer(
            self.tokenizer,
            n=prompt.n,
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            eos_token_ids=frozenset(self._eos).difference(request.stop.token_ids),
            min_tokens=request.stop.min_tokens,
            prompt=unpack_tokens(prompt.prompt[-4 * CONTEXT_TOKENS :]),
        )

    def render(self, request: TextRequest) -> str:
        """The conversation of `request` as the text that the model sees. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(f"model '{self._name}' has no chat template; send a prompt", param="messages")
        messages = request.messages or ()
        if not messages:
            raise InvalidRequest("the conversation has no messages", param="messages")
        if len(messages) > self._limits.max_messages:
            raise InvalidRequest(
                f"the conversation has {len(messages)} messages; at most {self._limits.max_messages} are taken", param="messages"
            )
        shaped = [_message(message, self._info.modalities) for message in messages]
        if request.continues_last:
            shaped[-1] = _marked(shaped[-1])
        text = self._template.render(
            shaped,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt and not request.continues_last,
            variables=request.chat_template_kwargs,
        )
        if not request.continues_last:
            return text
        text, marker, _ = text.rpartition(_CONTINUE)
        if not marker:
            raise InvalidRequest(f"the chat template of model '{self._name}' cannot continue a message", param="messages")
        return text

    async def _tokens(self, request: TextRequest) -> Sequence[int]:
        prompt = request.prompt
        if prompt is None:
            many = len(request.messages or ()) > _MANY_MESSAGES
            text = await asyncio.to_thread(self.render, request) if many else self.render(request)
            tokens: Sequence[int] = await self._encode(text, special_tokens=False)
        elif isinstance(prompt, str):
            tokens = await self._encode(prompt, special_tokens=True)
        else:
            tokens = prompt
            self._check_room(len(tokens))  # before a look at each of them
            if tokens:
                self.tokenizer.check_ids(tokens)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return tokens

    async def _encode(self, text: str, *, special_tokens: bool) -> list[int]:
        if len(text) > self._max_chars:
            raise ContextExceeded(
                f"the prompt has {len(text)} characters, more than fit into the model's context of "
                f"{self._info.context_length} tokens or the limit of {self._limits.max_prompt_chars} characters",
                param="prompt",
            )
        return await self.tokenizer.encode(text, special_tokens=special_tokens)

    def _check(self, request: TextRequest) -> None:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either a prompt or messages", param="prompt")
        for part in request.media:
            _check_part(part.get("type"), self._info.modalities)
        if len(request.stop_strings) > self._limits.max_stop_strings:
            raise InvalidRequest(
                f"{len(request.stop_strings)} stop strings are too many; at most {self._limits.max_stop_strings} are taken",
                param="stop",
            )
        for string in request.stop_strings:
            if not 0 < len(string) <= _MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(string)} characters; it must have 1 to {_MAX_STOP_STRING_CHARS}",
                    param="stop",
                )

    def _check_room(self, prompt_tokens: int) -> int:
        """Tokens left for the answer."""
        room = self._info.context_length - prompt_tokens
        if room < 1:
            raise ContextExceeded(
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the model's context of "
                f"{self._info.context_length} tokens",
                param="prompt",
            )
        return room

    def _stop(self, stop: Stop, prompt_tokens: int) -> Stop:
        room = self._check_room(prompt_tokens)
        max_tokens = room if stop.max_tokens is None else min(stop.max_tokens, room)
        if max_tokens < stop.min_tokens <= (stop.max_tokens or stop.min_tokens):
            raise InvalidRequest(
                f"min_tokens is {stop.min_tokens}, but the prompt's {prompt_tokens} tokens leave room for {room} in the model's "
                f"context of {self._info.context_length} tokens",
                param="min_tokens",
            )
        if stop.ignore_eos:
            return msgspec.structs.replace(stop, max_tokens=max_tokens)
        ids = tuple(dict.fromkeys((*stop.token_ids, *self._eos)))
        return msgspec.structs.replace(stop, max_tokens=max_tokens, token_ids=ids)


def _template(data: bytes, info: LlmInfo, limits: TextLimits) -> ChatTemplate:
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        raise EngineError("the model's chat template is not UTF-8") from error
    return ChatTemplate(source, bos_token=info.bos_token, eos_token=info.eos_token, max_chars=limits.max_prompt_chars)


def _message(message: Mapping[str, Any], modalities: Collection[str]) -> dict[str, Any]:
    """`message` in the shape templates are written for: `content` of a text-only model is one string, arguments are objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("each message must be an object with a 'role'", param="messages")
    result = dict(message)
    content = result.get("content")
    if isinstance(content, list | tuple):
        if modalities:
            for part in content:
                if not isinstance(part, str):
                    _check_part(part.get("type") if isinstance(part, Mapping) else None, modalities)
        else:
            result["content"] = "\n".join(map(_text_part, content))
    if isinstance(calls := result.get("tool_calls"), list | tuple):
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with a mark where its text ends, so that what the template puts behind it can be told apart."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str) or not content.strip():
        raise InvalidRequest("only a last message that is a text of the assistant can be continued", param="messages")
    return {**message, "content": content.rstrip() + _CONTINUE}


def _check_part(kind: object, modalities: Collection[str]) -> None:
    if kind != "text" and (not isinstance(kind, str) or _MODALITIES.get(kind) not in modalities):
        taken = ", ".join(("text", *sorted(modalities)))
        raise InvalidRequest(f"the model takes {taken}, and a content part has the type {kind!r:.80}", param="messages")


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(
            f"the model takes text only, and a message has a content part of type {kind!r:.80}", param="messages"
        )
    return text


def _tool_call(call: object) -> object:
    """OpenAI's clients write a call's arguments as JSON text; templates take them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # what a model wrote earlier need not be JSON
    return {**call, "function": {**function, "arguments": arguments}}
