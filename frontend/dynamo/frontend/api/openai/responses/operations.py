"""The operations of the Responses API and of conversations."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.response_objects import InputTokens
from dynamo.frontend.api.openai.responses.conversation_operations import (
    AddItems,
    ConversationOperations,
    CreateConversation,
    UpdateConversation,
)
from dynamo.frontend.api.openai.responses.conversations import ConversationObject
from dynamo.frontend.api.openai.responses.endpoint import Responses
from dynamo.frontend.api.openai.responses.events import ResponseObject
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest
from dynamo.frontend.api.openai.responses.stored_operations import StoredOperations

Describe = Callable[..., Operation]


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
        infer(
            method="GET",
            path="/v1/responses/{id}",
            handle=stored.read,
            summary="A stored response",
            response=ResponseObject,
        ),
        infer(method="DELETE", path="/v1/responses/{id}", handle=stored.delete, summary="Delete a stored response"),
        infer(
            path="/v1/responses/{id}/cancel",
            handle=stored.cancel,
            summary="Cancel a response in the background",
            response=ResponseObject,
        ),
        infer(
            method="GET",
            path="/v1/responses/{id}/input_items",
            handle=stored.items,
            summary="The conversation that a stored response continues",
        ),
        *_conversation_operations(ConversationOperations(edge), infer),
    ]


def _conversation_operations(handlers: ConversationOperations, infer: Describe) -> list[Operation]:
    one, items, item = "/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}"
    shown = ConversationObject
    return [
        infer(
            path="/v1/conversations",
            handle=handlers.create,
            summary="Begin a conversation that is stored",
            request=CreateConversation,
            response=shown,
        ),
        infer(method="GET", path=one, handle=handlers.read, summary="A conversation", response=shown),
        infer(path=one, handle=handlers.update, summary="Set its metadata", request=UpdateConversation, response=shown),
        infer(method="DELETE", path=one, handle=handlers.delete, summary="Delete a conversation with its items"),
        infer(path=items, handle=handlers.add_items, summary="Add items to a conversation", request=AddItems),
        infer(method="GET", path=items, handle=handlers.items, summary="The items of a conversation"),
        infer(method="GET", path=item, handle=handlers.item, summary="An item of a conversation"),
        infer(method="DELETE", path=item, handle=handlers.delete_item, summary="Delete an item", response=shown),
    ]
