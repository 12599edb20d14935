"""The operations of the Responses API and of conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dynamo.frontend.api.declaration import TEXT, Charge, Reads
from dynamo.frontend.api.http.errors import PathNotFound
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.response_objects import InputTokens
from dynamo.frontend.api.openai.responses.conversation_operations import (
    AddItems,
    ConversationOperations,
    CreateConversation,
    UpdateConversation,
)
from dynamo.frontend.api.openai.responses.endpoint import Responses
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest
from dynamo.frontend.api.openai.responses.stored_operations import StoredOperations
from dynamo.frontend.api.openai.store.background import IN_BACKGROUND
from dynamo.frontend.api.openai.store.conversations import ConversationObject
from dynamo.frontend.api.openai.store.events import ResponseObject

Describe = Callable[..., Operation]

STORED = replace(TEXT, reads=Reads.LITTLE, copies=1, charge=Charge.WORK, deadline_s=300.0)
"""What reads or changes what a key has stored."""
WRITTEN = replace(STORED, reads=TEXT.reads, copies=TEXT.copies)


def response_operations(edge: Edge, infer: Describe, tokens: Describe) -> list[Operation]:
    responses = Responses(edge)
    stored = StoredOperations(edge, responses)
    return [
        infer(
            path="/v1/responses",
            endpoint="responses",
            handle=responses,
            summary="Continue a conversation, by the Responses API",
            request=ResponsesRequest,
            response=ResponseObject,
            streams=True,
        ),
        tokens(
            path="/v1/responses/input_tokens",
            handle=responses.count,
            summary="The length of a response's input, in tokens",
            request=ResponsesRequest,
            response=InputTokens,
        ),
        infer(path="/v1/responses/compact", declared=replace(STORED, charge=Charge.CALL), handle=not_there),
        infer(
            method="GET",
            path="/v1/responses/{id}",
            declared=replace(STORED, deadline_s=IN_BACKGROUND.deadline_s),  # it may be followed to its end
            handle=stored.read,
            summary="A stored response",
            response=ResponseObject,
        ),
        infer(
            method="DELETE",
            path="/v1/responses/{id}",
            declared=STORED,
            handle=stored.delete,
            summary="Delete a stored response",
        ),
        infer(
            path="/v1/responses/{id}/cancel",
            declared=replace(STORED, charge=Charge.CALL),  # those that follow it may have all places of the key
            handle=stored.cancel,
            summary="Cancel a response in the background",
            response=ResponseObject,
        ),
        infer(
            method="GET",
            path="/v1/responses/{id}/input_items",
            declared=STORED,
            handle=stored.items,
            summary="The conversation that a stored response continues",
        ),
        *_conversation_operations(ConversationOperations(edge), partial(infer, declared=STORED)),
    ]


async def not_there(exchange: Exchange) -> None:
    """Say that the path is not found, which names nothing but looks as if it named a stored response."""
    raise PathNotFound(exchange.path)


def _conversation_operations(handlers: ConversationOperations, operation: Describe) -> list[Operation]:
    one, items, item = "/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}"
    shown = ConversationObject
    return [
        operation(
            path="/v1/conversations",
            declared=WRITTEN,
            handle=handlers.create,
            summary="Begin a conversation that is stored",
            request=CreateConversation,
            response=shown,
        ),
        operation(method="GET", path=one, handle=handlers.read, summary="A conversation", response=shown),
        operation(
            path=one,
            declared=WRITTEN,
            handle=handlers.update,
            summary="Set its metadata",
            request=UpdateConversation,
            response=shown,
        ),
        operation(method="DELETE", path=one, handle=handlers.delete, summary="Delete a conversation with its items"),
        operation(
            path=items, declared=WRITTEN, handle=handlers.add_items, summary="Add items to a conversation", request=AddItems
        ),
        operation(method="GET", path=items, handle=handlers.items, summary="The items of a conversation"),
        operation(method="GET", path=item, handle=handlers.item, summary="An item of a conversation"),
        operation(method="DELETE", path=item, handle=handlers.delete_item, summary="Delete an item", response=shown),
    ]
