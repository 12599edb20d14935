"""GET and DELETE /v1/responses/{id}, its input items, and cancelling."""

from __future__ import annotations

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.responses.endpoint import Responses
from dynamo.frontend.api.openai.store.pages import page_of_query
from dynamo.frontend.api.openai.store.stored import StoredResponses


class StoredOperations:
    """What can be done with a stored response. A key has only those that it made."""

    def __init__(self, edge: Edge, responses: Responses) -> None:
        self._edge = edge
        self._responses = responses

    @property
    def _stored(self) -> StoredResponses:
        return self._edge.required_store()

    async def read(self, exchange: Exchange) -> None:
        if exchange.query.get("stream", "").lower() == "true":
            first = _first_event(exchange.query.get("starting_after"))
            return await self._responses.follow(exchange, exchange.parameters["id"], first)
        response = await self._stored.read(exchange.account.name, exchange.parameters["id"], exchange.hold)
        await exchange.respond(encode(response))

    async def delete(self, exchange: Exchange) -> None:
        exchange.call()
        id = exchange.parameters["id"]
        await self._stored.delete(exchange.account.name, id, exchange.hold)
        await exchange.respond(encode({"id": id, "object": "response", "deleted": True}))

    async def cancel(self, exchange: Exchange) -> None:
        exchange.call()
        response = await self._stored.cancel(exchange.account.name, exchange.parameters["id"], exchange.hold)
        await exchange.respond(encode(response))

    async def items(self, exchange: Exchange) -> None:
        items = await self._stored.items(exchange.account.name, exchange.parameters["id"], exchange.hold)
        await exchange.respond(encode(page_of_query(items, exchange.query)))


def _first_event(after: str | None) -> int:
    """Return the number of the first event to be sent. Raises InvalidRequest."""
    if after is None:
        return 0
    if not after.isdecimal() or len(after) > 9:
        raise InvalidRequest("'starting_after' must be the number of an event", param="starting_after")
    return int(after) + 1
