"""GET and DELETE /v1/responses/{id}, its input items, and cancelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.stored import Item, StoredResponses

_MAX_ITEMS = 100
_DEFAULT_ITEMS = 20


class StoredOperations:
    """What can be done with a stored response. A key has only those that it made."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @property
    def _stored(self) -> StoredResponses:
        if self._edge.stored is None:
            raise Unsupported("this server does not store responses")
        return self._edge.stored

    async def read(self, exchange: Exchange) -> None:
        if exchange.query.get("stream", "").lower() == "true":
            raise InvalidRequest("stored responses are not streamed", param="stream")
        with exchange.account.occupy():
            response = await self._stored.read(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(encode(response))

    async def delete(self, exchange: Exchange) -> None:
        exchange.caller()
        id = exchange.parameters["id"]
        with exchange.account.occupy():
            await self._stored.delete(exchange.account.name, id)
        await exchange.respond(encode({"id": id, "object": "response", "deleted": True}))

    async def cancel(self, exchange: Exchange) -> None:
        exchange.caller()
        with exchange.account.occupy():
            response = await self._stored.cancel(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(encode(response))

    async def items(self, exchange: Exchange) -> None:
        query = exchange.query
        limit, is_ascending, after = read_limit(query.get("limit")), _is_ascending(query.get("order", "desc")), query.get("after")
        with exchange.account.occupy():
            items: Sequence[Item] = await self._stored.items(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(encode(page(items if is_ascending else items[::-1], limit, after)))


def page(items: Sequence[Item], limit: int, after: str | None) -> dict[str, Any]:
    """Return the items that follow the one with the id `after`, as a list of OpenAI's. Raises InvalidRequest."""
    if after is not None:
        position = next((index for index, item in enumerate(items) if item.get("id") == after), None)
        if position is None:
            raise InvalidRequest(f"'after' is {after[:80]!r}, which is none of the items", param="after")
        items = items[position + 1 :]
    shown = items[:limit]
    ends = (shown[0].get("id"), shown[-1].get("id")) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": len(items) > limit}


def read_limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_ITEMS
    if not text.isdecimal() or not 1 <= int(text[:9]) <= _MAX_ITEMS:
        raise InvalidRequest(f"'limit' must be an integer from 1 to {_MAX_ITEMS}", param="limit")
    return int(text)


def _is_ascending(order: str) -> bool:
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' must be 'asc' or 'desc', got {order[:40]!r}", param="order")
    return order == "asc"
