"""Images for models that take tokens.

A chat template gets a part `{"type": "image"}` for each, and writes the model's placeholder. The images travel beside the tokens,
and the engine puts as many tokens as it needs in the place of each placeholder.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, image_part, pack_tokens
from dynamo.frontend.preprocess.checks import MODALITIES, url_of

_PLACE = {"type": "image"}


def with_places(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return `message` with each image replaced by its place."""
    parts = _parts(message)
    return {**message, "content": [_PLACE if _is_image(part) else part for part in parts]} if parts else dict(message)


def with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return `message` with its content as a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def read_images(messages: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the images of a conversation, whose parts were checked, in their order. Raises InvalidRequest."""
    return read_parts(
        part for message in messages for part in _parts(message) if isinstance(part, Mapping) and part["type"] != "text"
    )


def has_parts(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there is content in parts, among which there may be images."""
    return any(_parts(message) for message in messages)


def read_parts(parts: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the images of content parts. Raises InvalidRequest for one that is not base64 in a data URL, and for other media."""
    images = []
    for part in parts:
        if not _is_image(part):
            raise InvalidRequest(f"models that take tokens take images only, not {part['type']!r:.80}", param="messages")
        images.append(image_part(_decoded(part)))
    return tuple(images)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and MODALITIES.get(part["type"]) == "image"


def check_places(tokens: Sequence[int], images: int, image_token: int | None) -> None:
    """Raises InvalidRequest unless the prompt has one place for each image."""
    if not images or image_token is None:
        return
    places = tokens.count(image_token)
    if places != images:
        raise InvalidRequest(
            f"the request has {images} images, and its prompt {places} places for them: the chat template must write one token "
            f"for each, and the text none (token {image_token})",
            param="messages",
        )


def prompt_of_contents(request: GenerateRequest, image_token: int | None) -> bytes:
    """Return the prompt with the digests of its images in their places, so that only equal images make equal blocks.

    Engines name the blocks of an image in ways of their own: a match with what an engine has cached ends before its first image.
    """
    if not request.media:
        return request.prompt
    digests = [part["sha256"] for part in request.media]
    tokens = request.tokens
    if image_token is None or tokens.count(image_token) != len(digests):
        return b"".join(digests) + request.prompt
    pieces, start = [], 0
    for digest in digests:
        place = tokens.index(image_token, start)
        pieces += [pack_tokens(tokens[start:place]), digest]
        start = place + 1
    return b"".join([*pieces, pack_tokens(tokens[start:])])


def _decoded(part: Mapping[str, Any]) -> bytes:
    url = url_of(part)
    head, _, data = url.partition(",")
    if not data or not head.endswith(";base64"):
        raise InvalidRequest(f"an image must be a data URL, data:…;base64,…; got {url!r:.80}", param="messages")
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"an image is not base64: {error}", param="messages") from error
