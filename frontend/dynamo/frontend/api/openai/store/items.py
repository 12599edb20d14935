"""Items of responses and conversations: parsed, encoded, bounded, and their ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from dynamo.common.errors import PayloadTooLarge
from dynamo.common.process.work import Hold, hold_nothing
from dynamo.frontend.api.http.json_scan import VALUE_BYTES

MAX_BYTES = 16 << 20
"""Bytes of the items of a conversation, or of a response, at most."""

MAX_ITEMS = 32_768
"""Items of a conversation, or of a response with all before it, at most. Each of them costs a microsecond where they are read."""

Item = Mapping[str, Any]

_BRIEF_BYTES = 64 * 1024
"""Bytes of items that are parsed before other requests have their turn."""
_FIELD = b'":'
_FEW_FIELDS = 1024
"""So many are not worth counting."""
_array_decoder = msgspec.json.Decoder(list[Raw])
_item_decoder = msgspec.json.Decoder(dict[str, Any])
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_parts_decoder = msgspec.json.Decoder(list[dict[str, Raw]])
_decoder = msgspec.json.Decoder()

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9]{1,9}")


def bounded(data: bytes) -> bytes:
    """Return what is to be stored. Raises PayloadTooLarge."""
    check_size(len(data))
    return data


def check_size(size_bytes: int) -> None:
    """Raise PayloadTooLarge for more than a conversation or a response may have."""
    if size_bytes > MAX_BYTES:
        raise PayloadTooLarge(f"the conversation has {size_bytes} bytes or more; responses are stored up to {MAX_BYTES}")


def check_count(items: int) -> None:
    """Raise PayloadTooLarge for more items than a conversation or a response may have."""
    if items > MAX_ITEMS:
        raise PayloadTooLarge(f"the conversation has {items} items or more; responses are stored up to {MAX_ITEMS}")


def split_items(array: bytes | Raw) -> list[Raw]:
    """Return the items of a JSON array, not parsed. Raises PayloadTooLarge."""
    items = _array_decoder.decode(array)
    check_count(len(items))
    return items


async def parse_items(array: bytes | Raw, hold: Hold = hold_nothing) -> list[dict[str, Any]]:
    """Return the items of a JSON array. What takes long is parsed piece by piece, so that the event loop goes on meanwhile.

    `hold` is called with what is built of each item's fields, before it is. Raises what that raises, and PayloadTooLarge.
    """
    items: list[dict[str, Any]] = []
    await asyncio.sleep(0)  # to find where items begin takes a while, too
    unbroken_bytes = 0
    for item in split_items(array):
        if unbroken_bytes > _BRIEF_BYTES:
            unbroken_bytes = 0
            await asyncio.sleep(0)
        data = bytes(memoryview(item))
        if (fields := data.count(_FIELD)) > _FEW_FIELDS:
            hold(VALUE_BYTES * fields)
        items.append(_item_decoder.decode(data))
        unbroken_bytes += len(data)
    return items


async def parse_output(array: bytes | Raw) -> list[dict[str, Any]]:
    """Return the items that a response has put out, without their log probabilities, which may be most of them by far."""
    items: list[dict[str, Any]] = []
    await asyncio.sleep(0)
    for item in split_items(array):
        await asyncio.sleep(0)
        fields = _fields_decoder.decode(item)
        content = fields.get("content")
        parsed = {name: _decoder.decode(value) for name, value in fields.items() if name != "content"}
        if content is not None:
            await asyncio.sleep(0)
            parsed["content"] = [_parsed_part(part) for part in _parts_decoder.decode(content)]
        items.append(parsed)
    return items


def _parsed_part(part: dict[str, Raw]) -> dict[str, Any]:
    return {name: [] if name == "logprobs" else _decoder.decode(value) for name, value in part.items()}


def without_logprobs(item: Item) -> Item:
    """Return an item of a response's output without log probabilities, which no prompt is made of."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


async def encode_items(items: Iterable[Item]) -> Raw:
    """Return the JSON array of items. What takes long is encoded piece by piece, so that the event loop goes on meanwhile.

    A thread would not help: the encoder keeps the interpreter to itself. Raises PayloadTooLarge.
    """
    pieces: list[bytes] = []
    size, unbroken_bytes = 1, 0
    for item in items:
        if unbroken_bytes > _BRIEF_BYTES:
            unbroken_bytes = 0
            await asyncio.sleep(0)
        check_size(size + _encoded_bytes(item))
        pieces.append(piece := msgspec.json.encode(item))
        unbroken_bytes += len(piece)
        size += len(piece) + 1
        check_size(size)
        check_count(len(pieces))
    if unbroken_bytes > _BRIEF_BYTES:
        await asyncio.sleep(0)
    return Raw(b"[%b]" % b",".join(pieces))


def _encoded_bytes(item: Item) -> int:
    """Return how many bytes of an item are encoded already: log probabilities, which may be far more than may be stored."""
    content = item.get("content")
    if not isinstance(content, list):
        return 0
    lists = (part.get("logprobs", ()) for part in content if isinstance(part, dict))
    return sum(memoryview(block).nbytes for blocks in lists for block in blocks if isinstance(block, Raw))


class ItemIds:
    """New ids for the items of a response. They name it, so that a reference to an item finds where it is stored."""

    def __init__(self, response_id: str, *, output: bool) -> None:
        self._end = f"{response_id.partition('_')[2]}{'o' if output else 'i'}"
        self._count = 0

    def new(self, item_type: str) -> str:
        self._count += 1
        return f"{_ID_PREFIXES.get(item_type, 'item')}_{self._end}{self._count - 1}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None if the item's id is none of `ItemIds`."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"
