"""The endpoints under /v1/conversations: a conversation, its metadata and its items."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dynamo.common.errors import NotFound
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import Metadata
from dynamo.frontend.api.openai.responses.requests import InputItem, conversation_items, understood_items
from dynamo.frontend.api.openai.responses.tools import leave_out
from dynamo.frontend.api.openai.store.conversations import Conversations
from dynamo.frontend.api.openai.store.items import Item, ItemIds
from dynamo.frontend.api.openai.store.pages import listed, page_of_query
from dynamo.frontend.api.openai.store.stored import StoredResponses, new_response_id

_Items = Annotated[list[InputItem], Meta(max_length=20)]


class CreateConversation(Struct, kw_only=True, frozen=True):
    """POST /v1/conversations"""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Struct, kw_only=True, frozen=True):
    """POST /v1/conversations/{id}"""

    metadata: Metadata


class AddItems(Struct, kw_only=True, frozen=True):
    """POST /v1/conversations/{id}/items"""

    items: _Items


class ConversationOperations:
    """What can be done with a conversation. A key has only those that it made."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._create = RequestReader(CreateConversation)
        self._update = RequestReader(UpdateConversation)
        self._add = RequestReader(AddItems)

    async def create(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._create.read(exchange)
        items = await self._to_store(exchange, request.items or [], [])
        created = await self._conversations.create(exchange.account.name, items, request.metadata or {})
        await exchange.respond(encode(created))

    async def read(self, exchange: Exchange) -> None:
        conversation = await self._conversations.read(exchange.account.name, exchange.parameters["id"], exchange.hold)
        await exchange.respond(encode(conversation))

    async def update(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._update.read(exchange)
        updated = await self._conversations.update(
            exchange.account.name, exchange.parameters["id"], request.metadata, exchange.hold
        )
        await exchange.respond(encode(updated))

    async def delete(self, exchange: Exchange) -> None:
        exchange.call()
        id = exchange.parameters["id"]
        await self._conversations.delete(exchange.account.name, id, exchange.hold)
        await exchange.respond(encode({"id": id, "object": "conversation.deleted", "deleted": True}))

    async def add_items(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._add.read(exchange)
        id = exchange.parameters["id"]
        refers = any(item.type == "item_reference" for item in request.items)
        items = await self._to_store(exchange, request.items, await self._items(exchange) if refers else [])
        await self._conversations.add(exchange.account.name, id, items, exchange.hold)
        await exchange.respond(encode(listed(items)))

    async def items(self, exchange: Exchange) -> None:
        items = await self._items(exchange)
        await exchange.respond(encode(page_of_query(items, exchange.query)))

    async def item(self, exchange: Exchange) -> None:
        wanted = exchange.parameters["item"]
        found = [item for item in await self._items(exchange) if item.get("id") == wanted]
        if not found:
            raise NotFound(f"item '{wanted[:80]}' is not found in the conversation")
        await exchange.respond(encode(found[0]))

    async def delete_item(self, exchange: Exchange) -> None:
        exchange.call()
        id, item = exchange.parameters["id"], exchange.parameters["item"]
        conversation = await self._conversations.delete_item(exchange.account.name, id, item, exchange.hold)
        await exchange.respond(encode(conversation))

    @property
    def _stored(self) -> StoredResponses:
        return self._edge.required_store("conversations")

    @property
    def _conversations(self) -> Conversations:
        return self._stored.conversations

    async def _items(self, exchange: Exchange) -> list[dict[str, Any]]:
        return await self._conversations.items(exchange.account.name, exchange.parameters["id"], exchange.hold)

    async def _to_store(self, exchange: Exchange, items: list[InputItem], history: list[dict[str, Any]]) -> list[Item]:
        """Return items with ids, and with those in place of references that they name."""
        stored = self._stored
        items, left_out = understood_items(items)
        leave_out(exchange, left_out)
        ids = ItemIds(new_response_id(), output=False)
        new = await self._edge.offload.run_if(exchange.has_large_body, conversation_items, items, ids)
        return await stored.resolved(exchange.account.name, new, history, ids, exchange.hold)
