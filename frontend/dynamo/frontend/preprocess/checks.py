"""What is checked of requests for text, whatever their model takes: messages, content parts, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo.common.errors import HarmfulRequest, InvalidRequest
from dynamo.common.model_card import LlmInfo
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.text import TextRequest

_MAX_STOP_STRING_CHARS = 1024
MODALITIES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""The modality that a model needs for content parts of these types."""
_RESERVED_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"),
        *("chat_template", "tokenizer", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""What is no variable of a chat template: some servers take all of them for arguments of what renders one, among these another
template, which may take for ever, and how its text is made tokens."""
URL_FIELDS = frozenset((*MODALITIES, "url"))
"""Where servers look for the URL of a part, or for an object that has it."""


def url_field(part: Mapping[str, Any]) -> str | None:
    """Return the field of a medium that has its URL, or an object with it: the one named like its type before the others.

    Parts of type `image_url` have an object there, those of type `input_image` a string in `image_url`, and others have `url`.
    """
    kind = part["type"]
    alike = (field for field, modality in MODALITIES.items() if modality == MODALITIES[kind])
    return next((field for field in (kind, *alike, "url") if part.get(field) is not None), None)


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of a medium, with the content if it is a data URL; empty if it has none."""
    field = url_field(part)
    value = None if field is None else part[field]
    url = value.get("url") if isinstance(value, Mapping) else value
    return url if isinstance(url, str) else ""


def media_in(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the media of a conversation in their order, none of them checked."""
    contents = (content for message in messages if isinstance(content := message.get("content"), list | tuple))
    return tuple(
        part
        for content in contents
        for part in content
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in MODALITIES
    )


def check_variables(variables: Collection[str]) -> None:
    """Raise HarmfulRequest unless these are names of variables for a chat template."""
    if variables and (reserved := _RESERVED_VARIABLES.intersection(variables)):
        raise HarmfulRequest(f"'chat_template_kwargs' must not set {', '.join(sorted(reserved))}", param="chat_template_kwargs")


def check_text_request(request: TextRequest, info: LlmInfo, limits: TextLimits) -> None:
    """Raises InvalidRequest for a request with two prompts or none, media that the model does not take, bad stop strings, or
    variables for the chat template that are none.
    """
    check_variables(request.chat_template_kwargs)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either a prompt or messages", param="prompt")
    for part in request.media:
        _check_part(part, info.modalities)
    if len(request.stop_strings) > limits.max_stop_strings:
        raise InvalidRequest(
            f"got {len(request.stop_strings)} stop strings; at most {limits.max_stop_strings} are allowed",
            param="stop",
        )
    for string in request.stop_strings:
        if not 0 < len(string) <= _MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"a stop string has {len(string)} characters; it must have 1 to {_MAX_STOP_STRING_CHARS}",
                param="stop",
            )


def check_length(messages: Sequence[Mapping[str, Any]], limits: TextLimits) -> None:
    """Raises InvalidRequest for a conversation without messages, or with too many."""
    if not messages:
        raise InvalidRequest("the conversation has no messages", param="messages")
    if len(messages) > limits.max_messages:
        raise InvalidRequest(f"got {len(messages)} messages; at most {limits.max_messages} are allowed", param="messages")


def with_checked_content(message: Mapping[str, Any], modalities: Collection[str]) -> dict[str, Any]:
    """Return a copy of `message`; for a model of text alone, with content of several parts as one text. Raises InvalidRequest."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("each message must be an object with a 'role'", param="messages")
    result = dict(message)
    content = result.get("content")
    if isinstance(content, list | tuple):
        if modalities:
            for part in content:
                if not isinstance(part, str):
                    _check_part(part, modalities)
        else:
            result["content"] = "\n".join(map(_text_part, content))
    return result


def _check_part(part: object, modalities: Collection[str]) -> None:
    """Raises InvalidRequest for a part that the model does not take, or that would have to be fetched."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" and (not isinstance(kind, str) or MODALITIES.get(kind) not in modalities):
        supported = ", ".join(("text", *sorted(modalities)))
        raise InvalidRequest(f"the model supports {supported}; got a content part of type {kind!r:.80}", param="messages")
    assert isinstance(part, Mapping)
    for field, value in part.items():
        if field in URL_FIELDS and value is not None:
            _check_url(value)


def _check_url(value: object) -> None:
    """Raises InvalidRequest for media at a URL: engines follow none, and frontends have fetched what they may."""
    url = value.get("url", "data:") if isinstance(value, Mapping) else value
    if not (isinstance(url, str) and url.startswith("data:")):
        raise InvalidRequest(f"images and other media must be data URLs, data:…;base64,…; got {url!r:.80}", param="messages")


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"the model supports text only; got a content part of type {kind!r:.80}", param="messages")
    return text
