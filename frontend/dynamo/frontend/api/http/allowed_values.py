"""The values of fields that take only a few, for the errors of requests that have others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


def allowed_values(kind: type, path: str) -> list[object]:
    """Return the values that a request of `kind` may have at `path`, written as in msgspec's errors; [] if any will do."""
    places: list[inspect.Type] = [*_alternatives(_info(kind))]
    for step in _STEP.findall(path):
        places = [alternative for place in places for inner in _inside(place, step) for alternative in _alternatives(inner)]
    return list(dict.fromkeys(value for place in places for value in _values(place)))


@cache
def _info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(info: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(info, inspect.Metadata):
        yield from _alternatives(info.type)
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _alternatives(each)
    else:
        yield info


def _inside(info: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(info, inspect.StructType):
        yield from (field.type for field in info.fields if field.encode_name == step)
        if info.tag_field == step and info.tag is not None:
            yield inspect.LiteralType((info.tag,))
    elif isinstance(info, inspect.ListType) and step.startswith("["):
        yield info.item_type
    elif isinstance(info, inspect.DictType) and step.startswith("["):
        yield info.value_type


def _values(info: inspect.Type) -> Iterable[object]:
    if isinstance(info, inspect.EnumType):
        return (member.value for member in info.cls)
    return info.values if isinstance(info, inspect.LiteralType) else ()
