"""A model on a server of audio or images, as a relay: requests and responses pass through as HTTP has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.http.client import MAX_BODY_BYTES, HttpClient, HttpResponse
from dynamo.common.http.served import media_type
from dynamo.common.model_card import ModelCard
from dynamo.common.process.steps import Steps
from dynamo.common.tensors.relay import (
    REALTIME_PATH,
    RELAYED_PATHS,
    SERVER_MODEL,
    RelayedPart,
    from_tensors,
    part_to_outputs,
    relay_card,
)
from dynamo.common.tensors.request import TensorRequest
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.remote.conversations import Conversations
from dynamo.worker.engine.remote.errors import OF_SERVER, failure_of
from dynamo.worker.engine.remote.models import fetch_models, when_ready

_TRACE_HEADERS: Final[tuple[str, ...]] = ("traceparent", "tracestate")
_EVENTS: Final = "text/event-stream"


class RelayEngine:
    """Serves the model of one server."""

    def __init__(self, client: HttpClient, *, name: str = "") -> None:
        """`name` chooses among several models of the server, by default its first, or is another name for the only one."""
        self._client = client
        self._name = name
        self._is_closed = False
        self._conversations = Conversations(client, Steps())

    def __repr__(self) -> str:
        return f"<RelayEngine {self._name} at {self._client}>"

    async def start(self) -> Sequence[ModelCard]:
        """Wait for the server. Raises InvalidRequest for one that has no model."""
        models = await when_ready(partial(fetch_models, self._client))
        served = next((model for model in models if model.id == self._name), models[0])
        self._name = self._name or served.name
        labels = {} if served.id == self._name else {SERVER_MODEL: served.id}
        return [relay_card(self._name, served.backend, labels)]

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        if self._is_closed:
            raise Unavailable("the engine is closed")
        relayed = from_tensors(request)
        if relayed.path == REALTIME_PATH:
            async with aclosing(self._conversations.serve(relayed.body, context)) as parts:
                async for part in parts:
                    yield _response(part)
            return
        if relayed.path not in RELAYED_PATHS:
            raise InvalidRequest(
                f"{relayed.path[:80]!r} is no path for requests to a model: {', '.join(sorted(RELAYED_PATHS))} are"
            )
        headers: dict[str, str] = {name: context.headers[name] for name in _TRACE_HEADERS if name in context.headers}
        headers |= {"content-type": relayed.content_type, "x-request-id": context.request_id}
        async with self._client.send("POST", relayed.path, bytes(relayed.body), headers) as response:
            if response.status in OF_SERVER:
                raise failure_of(self._client, response.status, await response.read(), response.headers.get("retry-after", ""))
            kind = response.headers.get("content-type", "")
            first = RelayedPart(b"", response.status, kind)
            pieces = _whole_events(response) if media_type(kind) == _EVENTS else response.chunks()
            async with aclosing(pieces):
                async for piece in pieces:
                    yield _response(RelayedPart(piece, first.status, first.content_type) if first.status else RelayedPart(piece))
                    first = RelayedPart(b"")
            if first.status:  # the body is empty
                yield _response(first)

    async def close(self) -> None:
        self._is_closed = True
        self._client.close()


def _response(part: RelayedPart) -> TensorResponse:
    return TensorResponse(*part_to_outputs(part))


async def _whole_events(response: HttpResponse) -> AsyncGenerator[bytes, None]:
    """Yield a stream of server-sent events in pieces that end with an event, so that a comment may come between them."""
    received = bytearray()
    """The beginning of an event, which has been searched for its end already."""
    line_end = b""
    async with aclosing(response.chunks()) as chunks:
        async for chunk in chunks:
            text = line_end + chunk
            line_end = b"\r" if text.endswith(b"\r") else b""  # the other half of it may come next
            begin = max(0, len(received) - 1)
            received += text.removesuffix(b"\r").replace(b"\r\n", b"\n")
            end = received.rfind(b"\n\n", begin) + 2
            if end > 1:
                yield bytes(received[:end])
                del received[:end]
            if len(received) > MAX_BODY_BYTES:
                raise EngineError(f"the server sent an event of more than {MAX_BODY_BYTES} bytes")
    if received:
        yield bytes(received) + b"\n\n"
