"""The operations for audio, images and videos, and chats of models that make more than text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynamo.common.errors import DynamoError
from dynamo.common.tensors.relay import CHAT_PATH, FORM_PATHS, JSON_PATHS, REALTIME_PATH, relays_http
from dynamo.frontend.api.declaration import TEXT, Reads
from dynamo.frontend.api.http.body_fields import model_in
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import scanned_body
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.media.realtime import Realtime
from dynamo.frontend.api.openai.media.relays import Relay

_FORM = replace(TEXT, reads=Reads.FILE, copies=4)
"""A form with files; beside it there are the request to the model and, where its name changes, a form with the other name."""
_CONVERSATION = replace(TEXT, reads=Reads.NAME, copies=1)
"""What is read later is held as it comes, and the conversation's own deadline is `realtime.LONGEST_S`."""
_SUMMARIES = {
    "/v1/audio/transcriptions": "Speech to text",
    "/v1/audio/translations": "Speech to text in English",
    "/v1/audio/speech": "Text to speech",
    "/v1/images/generations": "A text to images",
    "/v1/images/edits": "Images to changed ones",
    "/v1/images/variations": "An image to others like it",
    "/v1/videos": "A text to a video, in the response",
    "/v1/videos/sync": "A text, and images, to a video, in the response",
    REALTIME_PATH: "Conversations over WebSockets",
}


def media_operations(edge: Edge, infer: Callable[..., Operation]) -> list[Operation]:
    def operation(path: str, handle: Handler, **declared: object) -> Operation:
        return infer(
            path=path, endpoint=path.removeprefix("/v1/").replace("/", "_"), handle=handle, summary=_SUMMARIES[path], **declared
        )

    return [
        *(operation(path, Relay(edge, path, is_form=True), declared=_FORM) for path in FORM_PATHS),
        *(operation(path, Relay(edge, path)) for path in JSON_PATHS),
        operation(REALTIME_PATH, Realtime(edge), method="GET", declared=_CONVERSATION),
    ]


def relayed_or(edge: Edge, handle: Handler) -> Handler:
    """Return the handler of chats: those of relays pass through, since they may make audio or images; `handle` serves others."""
    relay = Relay(edge, CHAT_PATH)

    async def handle_either(exchange: Exchange) -> None:
        if not edge.plane.relays:
            return await handle(exchange)
        body = await scanned_body(exchange)
        exchange.pass_on(exchange.endpoint, body)
        try:
            is_relayed = relays_http(edge.plane.described(exchange.account, model_in(body)))
        except DynamoError:  # which `handle` says
            is_relayed = False
        await (relay if is_relayed else handle)(exchange)

    return handle_either
