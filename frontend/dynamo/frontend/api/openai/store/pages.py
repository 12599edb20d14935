"""Lists as OpenAI pages them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import read_limit

_MAX_ITEMS = 100
_id_of_item = methodcaller("get", "id")


def page(items: Sequence[Any], query: Mapping[str, str], id_of: Callable[[Any], object] = _id_of_item) -> dict[str, Any]:
    """Return the page that `limit` and `after` select, as a list of OpenAI's. Raises InvalidRequest."""
    limit, after, first = limit_of(query), query.get("after"), 0
    if after is not None:
        # Behind the last one with the id, in case that ids repeat: pages must come to an end.
        first = max((position for position, item in enumerate(items, 1) if id_of(item) == after), default=0)
        if not first:
            raise InvalidRequest(f"'after' is {after[:80]!r}, which is none of the items", param="after")
    return {**listed(items[first : first + limit], id_of), "has_more": len(items) > first + limit}


def listed(items: Sequence[Any], id_of: Callable[[Any], object] = _id_of_item) -> dict[str, Any]:
    """Return a list that is not paged."""
    ends = (id_of(items[0]), id_of(items[-1])) if items else (None, None)
    return {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}


def limit_of(query: Mapping[str, str]) -> int:
    """Return how many items a page has. Raises InvalidRequest."""
    return read_limit(query.get("limit", "20"), _MAX_ITEMS)


def page_of_query(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page that `limit`, `order` (newest first, unless `asc`) and `after` select. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' must be 'asc' or 'desc', got {order[:40]!r}", param="order")
    return page(items if order == "asc" else items[::-1], query)
