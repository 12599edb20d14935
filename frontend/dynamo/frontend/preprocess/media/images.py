"""Images for models that take tokens.

A chat template gets a part `{"type": "image"}` for each, and writes the model's placeholder. The images travel beside the tokens,
and the engine puts as many tokens as it needs in the place of each placeholder.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, image_part, pack_tokens
from dynamo.frontend.preprocess.checks import MODALITIES, URL_FIELDS, url_of
from dynamo.frontend.preprocess.media.pixels import PixelBudget

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


def read_images(messages: Iterable[Mapping[str, Any]], max_pixels: int) -> tuple[dict[str, Any], ...]:
    """Return the images of a conversation, whose parts were checked, in their order. Raises InvalidRequest."""
    parts = (part for message in messages for part in _parts(message) if isinstance(part, Mapping) and part["type"] != "text")
    return read_parts(parts, max_pixels)


def has_parts(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there is content in parts, among which there may be images."""
    return any(_parts(message) for message in messages)


def read_parts(parts: Iterable[Mapping[str, Any]], max_pixels: int) -> tuple[dict[str, Any], ...]:
    """Return the images of content parts.

    Raises InvalidRequest for one that is not base64 in a data URL, for other media, and for more than `max_pixels` together.
    """
    images, budget = [], PixelBudget(max_pixels)
    for part in parts:
        if not _is_image(part):
            raise InvalidRequest(f"models that take tokens take images only, not {part['type']!r:.80}", param="messages")
        data = _decoded(url_of(part))
        budget.take(data)
        images.append(image_part(data))
    return tuple(images)


def content_digest(part: Mapping[str, Any], budget: PixelBudget) -> str:
    """Return what names a medium for routers: equal for equal content, however its URL writes that.

    Raises InvalidRequest for an image that is too large for `budget`. A URL that cannot be read is left to the engine.
    """
    said: dict[str, Any] = {}
    contents = []
    for name, value in part.items():
        settings: Mapping[str, Any] = value if isinstance(value, Mapping) else {"url": value}
        if name not in URL_FIELDS or not isinstance(url := settings.get("url"), str):
            said[name] = value
            continue
        try:
            data = _decoded(url)
        except InvalidRequest:
            data = url.encode("utf-8", "surrogatepass")
        if _is_image(part):
            budget.take(data)
        contents.append(sha256(data).hexdigest())
        said |= {setting: each for setting, each in settings.items() if setting != "url"}
    if said.get("detail") == "auto":  # as without it
        del said["detail"]
    said["type"] = MODALITIES[part["type"]]
    return sha256(msgspec.json.encode([contents, said], order="deterministic")).hexdigest()


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


def _decoded(url: str) -> bytes:
    """Return the content of a data URL. Raises InvalidRequest."""
    head, _, data = url.partition(",")
    if not data or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"an image must be a data URL, data:…;base64,…; got {url!r:.80}", param="messages")
    try:
        return binascii.a2b_base64("".join(data.split()), strict_mode=True)  # lines are broken by some encoders
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"an image is not base64: {error}", param="messages") from error
