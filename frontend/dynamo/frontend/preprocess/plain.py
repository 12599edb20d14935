"""The text side of a model whose engine takes text and generates text: neither tokenizer nor chat template are needed here.

The engine gets the conversation itself, in OpenAI's form. Tools are passed on to engines that write calls in a format with a
parser of its own; for all others, and for calls that are required, they are described in the system message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, TextPrompt, pack_text
from dynamo.common.generation_rules import check_request
from dynamo.common.guided_rules import check_guided
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.common.output_formats import GENERIC
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.checks import check_length, check_text_request, with_checked_content
from dynamo.frontend.preprocess.media.images import content_digest
from dynamo.frontend.preprocess.media.media import MediaUrls
from dynamo.frontend.preprocess.media.pixels import PixelBudget
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.text import ContextExceeded, TextDelta, TextRequest
from dynamo.frontend.preprocess.tokens.detokenize import new_stoppers
from dynamo.frontend.preprocess.tools.prompt import in_plain_messages

_MANY_MESSAGES = 128
"""Longer conversations, and those with media, are packed in a thread."""


class PlainTextModel:
    """The text pipeline of one model card whose engine takes text. Requests may use it concurrently."""

    template_source = ""

    def __init__(self, card: ModelCard, limits: TextLimits, offload: Offload, media: MediaUrls | None = None) -> None:
        """Without `media`, requests have data URLs only."""
        assert card.llm is not None
        self._name = card.name
        self._info = card.llm
        self._limits = limits
        self._offload = offload
        self._media = media
        self.tokenizer = NoVocabulary(card.name)

    def __repr__(self) -> str:
        return f"PlainTextModel({self._name!r})"

    async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest:
        """Return `request` with its prompt as text. Raises InvalidRequest, also for what needs token ids."""
        self._check_needs(request)
        if request.media and self._media is not None:
            request = await self._media.inlined(request, self._info.modalities, key)
        check_text_request(request, self._info, self._limits)
        is_long = len(request.messages or ()) > _MANY_MESSAGES or bool(request.media)
        prompt, media = await self._offload.run_if(is_long, self._pack, request)
        generate = GenerateRequest(
            model=request.model,
            prompt=prompt,
            sampling=request.sampling,
            stop=request.stop,
            n=request.n,
            cache_salt=request.cache_salt,
            media=media,
        )
        check_request(generate)
        return generate

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> PlainDetokenizer:
        return PlainDetokenizer(prompt.n, request.stop_strings, request.include_stop_string)

    async def render(self, request: TextRequest) -> str:
        """Raises InvalidRequest: only the engine knows the text that the model gets."""
        self._needs_tokens("the text of a rendered conversation")

    def _pack(self, request: TextRequest) -> tuple[bytes, tuple[dict[str, Any], ...]]:
        """Return the prompt, and the media that it names."""
        if request.messages is None:
            if len(request.prompt or "") > self._limits.max_prompt_chars:
                raise ContextExceeded(
                    f"prompt is too long: {len(request.prompt or '')} characters > {self._limits.max_prompt_chars} maximum",
                    param="prompt",
                )
            assert isinstance(request.prompt, str)
            return pack_text(TextPrompt(prompt=request.prompt)), ()
        check_length(request.messages, self._limits)
        is_guided, most = request.sampling.guided is not None, self._limits.max_image_pixels
        return pack_conversation(request, request.messages, self._info, most, plain_tools=is_guided)

    def _check_needs(self, request: TextRequest) -> None:
        """Raises InvalidRequest for a setting that needs tokens or the template, which only the engine has."""
        needs = {
            "prompt": request.prompt is not None and not isinstance(request.prompt, str),
            "chat_template": bool(request.chat_template),
            "continue_final_message": request.continues_last,
            "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
            "truncation": request.drops_messages,
            "bad_words": bool(request.bad_words),
            "logprobs": request.logprobs is not None,
            "prompt_logprobs": request.prompt_logprobs is not None,
        }
        for param, is_needed in needs.items():
            if is_needed:
                what = "a prompt in token ids" if param == "prompt" else f"'{param}'"
                self._needs_tokens(what, param)

    def _needs_tokens(self, what: str, param: str | None = None) -> Never:
        raise InvalidRequest(f"model '{self._name}' takes text and generates text: it does not support {what}", param=param)


def pack_conversation(
    request: TextRequest, messages: Sequence[Mapping[str, Any]], info: LlmInfo, max_image_pixels: int, *, plain_tools: bool
) -> tuple[bytes, tuple[dict[str, Any], ...]]:
    """Return a conversation for an engine that renders it, and the media that it names.

    Tools are described in its messages with `plain_tools`, and where the model's template has no place for them. Raises
    InvalidRequest, also if its images have more than `max_image_pixels` together.
    """
    messages, tools = [with_checked_content(message, info.modalities) for message in messages], request.tools
    if plain_tools or info.tool_parser == GENERIC.name:
        messages, tools = in_plain_messages(messages, tools), ()
    if schemas := [tool["function"].get("parameters") for tool in tools]:  # llama-server compiles them, whatever the choice
        check_guided({"json_schema": {"anyOf": schemas}})
    placed, media = _with_places(messages, PixelBudget(max_image_pixels))
    variables = dict(request.chat_template_kwargs)
    return pack_text(TextPrompt(tools=list(map(dict, tools)), template_variables=variables, messages=placed)), media


def _with_places(
    messages: Sequence[Mapping[str, Any]], budget: PixelBudget
) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]:
    """Return messages in which media have left their number and, for routers, their digest; and the media by their numbers."""
    media: list[dict[str, Any]] = []
    result = []
    for message in messages:
        content = message.get("content")
        shaped = dict(message)
        if isinstance(content, list | tuple):
            parts: list[Any] = []
            for part in content:
                if isinstance(part, str) or part["type"] == "text":
                    parts.append(part)
                    continue
                parts.append({"type": "media", "index": len(media), "sha256": content_digest(part, budget)})
                media.append(part)
            shaped["content"] = parts
        result.append(shaped)
    return result, tuple(media)


class PlainDetokenizer:
    """Passes the text of one request's choices on, up to a stop string."""

    def __init__(self, n: int, stop_strings: Sequence[str], include_stop_string: bool) -> None:
        self._running = dict(enumerate(new_stoppers(stop_strings, n)))
        self._include_stop_string = include_stop_string

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return not self._running

    def feed(self, delta: Delta) -> TextDelta | None:
        """Return new text, or the end of a choice; None for text that may turn out to be a stop string."""
        if delta.index not in self._running:
            return None
        text, stopper = delta.text, self._running[delta.index]
        if stopper is not None:
            text = stopper.push(text)
            if stopper.hit is not None:
                del self._running[delta.index]
                text += stopper.hit if self._include_stop_string else ""
                return TextDelta(delta.index, text, (), FinishReason.STOP, None, stopper.hit)
            if delta.finish_reason is not None:
                text += stopper.held
        if delta.finish_reason is not None:
            del self._running[delta.index]
        elif not text:
            return None
        return TextDelta(delta.index, text, (), delta.finish_reason)


class NoVocabulary:
    """Stands for the tokenizer of a model that takes text: requests that need one are refused."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def encode(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        self._refuse()

    def decode(self, tokens: list[int], /, *, skip_special_tokens: bool) -> str:
        """Return no text: the end of a prompt is not that of the text which the model gets."""
        return ""

    async def decode_prompt(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        self._refuse()

    def token_bytes(self, token: int, /) -> bytes | None:
        return None

    def token_name(self, token: int, /) -> str:
        self._refuse()

    def check_ids(self, tokens: Sequence[int], param: str = "prompt", /) -> None:
        self._refuse()

    def _refuse(self) -> Never:
        raise InvalidRequest(f"model '{self._model}' takes text and generates text: its tokens are not known here", param="model")
