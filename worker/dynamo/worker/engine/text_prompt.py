"""What engines share that take text: the prompt with its media in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, TextPrompt, unpack_text


def read_prompt(request: GenerateRequest) -> TextPrompt:
    """Return the prompt of a request to a model that takes text. Raises InvalidRequest."""
    prompt = unpack_text(request.prompt)
    if (prompt.prompt is None) == (prompt.messages is None):
        raise InvalidRequest("the request must have either a prompt or messages", param="prompt")
    return with_media(prompt, request.media)


def with_media(prompt: TextPrompt, media: Sequence[Mapping[str, Any]]) -> TextPrompt:
    """Return `prompt` with the content parts `media` in their places. Raises InvalidRequest."""
    if prompt.messages is None or not media:
        return prompt
    return msgspec.structs.replace(prompt, messages=[_with_media(message, media) for message in prompt.messages])


def _with_media(message: dict[str, Any], media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, media) for part in content]}


def _part(part: Any, media: Sequence[Mapping[str, Any]]) -> Any:
    if not isinstance(part, dict) or part.get("type") != "media":
        return part
    index = part.get("index")
    if not isinstance(index, int) or not 0 <= index < len(media):
        raise InvalidRequest(f"the conversation names medium {index!r:.20} of {len(media)}", param="messages")
    return dict(media[index])
