"""Lists as OpenAI pages them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest

_MAX_ITEMS = 100
_DEFAULT_ITEMS = 20


def page(items: Sequence[Mapping[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return the items that follow the one with the id `after`, as a list of OpenAI's. Raises InvalidRequest."""
    if after is not None:
        # The last one, in case that ids repeat: pages must come to an end.
        position = max((index for index, item in enumerate(items) if item.get("id") == after), default=None)
        if position is None:
            raise InvalidRequest(f"'after' is {after[:80]!r}, which is none of the items", param="after")
        items = items[position + 1 :]
    return {**listed(items[:limit]), "has_more": len(items) > limit}


def listed(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list that is not paged."""
    ends = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}


def read_limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_ITEMS
    if not text.isdecimal() or not 1 <= int(text[:9]) <= _MAX_ITEMS:
        raise InvalidRequest(f"'limit' must be an integer from 1 to {_MAX_ITEMS}", param="limit")
    return int(text)


def page_of_query(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page that `limit`, `order` (newest first, unless `asc`) and `after` select. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' must be 'asc' or 'desc', got {order[:40]!r}", param="order")
    return page(items if order == "asc" else items[::-1], read_limit(query.get("limit")), query.get("after"))
