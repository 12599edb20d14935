"""Lists as OpenAI pages them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import read_limit

_MAX_ITEMS = 100


def page(items: Sequence[Mapping[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return the items that follow the one with the id `after`, as a list of OpenAI's. Raises InvalidRequest."""
    if after is not None:
        items = items[position_after(after, (item.get("id") for item in items)) :]
    return {**listed(items[:limit]), "has_more": len(items) > limit}


def position_after(after: str, ids: Iterable[object]) -> int:
    """Return the position of the first item of the page that follows the item with the id `after`. Raises InvalidRequest."""
    # The last one, in case that ids repeat: pages must come to an end.
    position = max((index for index, id in enumerate(ids) if id == after), default=None)
    if position is None:
        raise InvalidRequest(f"'after' is {after[:80]!r}, which is none of the items", param="after")
    return position + 1


def listed(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list that is not paged."""
    ends = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return {"object": "list", "data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}


def limit_of(query: Mapping[str, str]) -> int:
    """Return how many items a page has. Raises InvalidRequest."""
    return read_limit(query.get("limit", "20"), _MAX_ITEMS)


def page_of_query(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page that `limit`, `order` (newest first, unless `asc`) and `after` select. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' must be 'asc' or 'desc', got {order[:40]!r}", param="order")
    return page(items if order == "asc" else items[::-1], limit_of(query), query.get("after"))
