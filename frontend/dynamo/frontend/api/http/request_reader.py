"""Read requests of protocols that others define and extend: OpenAI's and Anthropic's.

A field that this server does not have is ignored, counted and, the first time, logged; or refused, where the operator says so.
That holds for the request itself and for the objects that are its settings (`stream_options`, `nvext.router`). Unknown fields of
objects in arrays, such as messages and tools, are always ignored: clients send back what other servers added to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import decode, scanned_body

T = TypeVar("T")

_LONG_BYTES = 128 * 1024
"""A longer body is scanned, decoded and searched for unknown fields in turns of their own of the event loop, of 0.3 to 0.9 ms for
a prompt of 100,000 tokens (`benchmarks.long_prompts`, 2026-11-27)."""
_MOST_FIELDS = 32
"""Unknown fields of one request that are looked at, at most."""

KnownFields: TypeAlias = "Mapping[str, KnownFields | None]"
"""The fields of an object: for those that are objects themselves, their own fields."""


class RequestReader(Generic[T]):
    """Reads the bodies of one operation."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        plain: type = kind  # mypy does not take type[T] for hashable
        self._known = _known_fields(plain)

    async def read(self, exchange: Exchange) -> T:
        """Return the request. Raises InvalidRequest, with the field as `param`, and what `Exchange.body` raises."""
        body = await scanned_body(exchange)
        is_long = exchange.body_bytes > _LONG_BYTES
        if is_long:
            await asyncio.sleep(0)
        request = decode(self._decoder, body, exchange.settings.options.max_json_depth)
        if is_long:
            await asyncio.sleep(0)
        try:
            for field in islice(_unknown(body, self._known, ""), _MOST_FIELDS):
                exchange.settings.unknown_fields.ignore(exchange.endpoint or exchange.path, field)
        except UnicodeDecodeError as error:  # only what is used of a request has been read as text
            raise InvalidRequest(f"the body is not JSON: the name of a field is not UTF-8: {error}") from None
        return request


_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def _known_fields(kind: type) -> KnownFields:
    return _known(inspect.type_info(kind)) or {}


def _known(info: inspect.Type) -> KnownFields | None:
    if isinstance(info, inspect.Metadata):
        return _known(info.type)
    if isinstance(info, inspect.UnionType):  # of tagged structs: the fields of all of them
        structs = [known for known in map(_known, info.types) if known is not None]
        return {name: fields for known in structs for name, fields in known.items()} if structs else None
    if not isinstance(info, inspect.StructType):
        return None
    tag = {} if info.tag_field is None else {info.tag_field: None}
    return tag | {field.encode_name: _known(field.type) for field in info.fields}


def _unknown(body: bytes | msgspec.Raw, known: KnownFields, prefix: str) -> Iterator[str]:
    for name, value in _objects.decode(body).items():
        if name not in known:
            yield prefix + name
        elif (fields := known[name]) is not None and bytes(memoryview(value)[:1]) == b"{":
            yield from _unknown(value, fields, f"{prefix}{name}.")
