"""What is checked of requests for text, whatever their model takes: messages, content parts, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.text import TextRequest

_MAX_STOP_STRING_CHARS = 1024
_MODALITIES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""The modality that a model needs for content parts of these types."""


def check_text_request(request: TextRequest, info: LlmInfo, limits: TextLimits) -> None:
    """Raises InvalidRequest for a request with two prompts or none, media that the model does not take, or bad stop strings."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either a prompt or messages", param="prompt")
    for part in request.media:
        _check_part(part.get("type"), info.modalities)
        _check_url(part)
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
                    _check_part(part.get("type") if isinstance(part, Mapping) else None, modalities)
        else:
            result["content"] = "\n".join(map(_text_part, content))
    return result


def _check_part(kind: object, modalities: Collection[str]) -> None:
    if kind != "text" and (not isinstance(kind, str) or _MODALITIES.get(kind) not in modalities):
        supported = ", ".join(("text", *sorted(modalities)))
        raise InvalidRequest(f"the model supports {supported}; got a content part of type {kind!r:.80}", param="messages")


def _check_url(part: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an image that would have to be fetched: neither frontends nor engines follow a client's URLs."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if image is not None and not (isinstance(url, str) and url.startswith("data:")):
        raise InvalidRequest(f"an image must be a data URL, data:image/…;base64,…; got {url!r:.80}", param="messages")


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"the model supports text only; got a content part of type {kind!r:.80}", param="messages")
    return text
