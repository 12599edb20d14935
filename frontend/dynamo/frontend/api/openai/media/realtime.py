"""`/v1/realtime`: conversations over WebSockets, which pass through to a model that has them: see `dynamo.common.tensors.relay`.

A conversation is one request to the model, open until one side closes it, to which belongs what the client says. It is charged by
the tokens that the server says responses took, and an estimate of what it has said without: `SpokenTokens`. It ends when its key
has none left for a while.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from dynamo.common.errors import DeadlineExceeded, DynamoError, EngineError, Forbidden, InvalidRequest, Overloaded, RateLimited
from dynamo.common.process.work import Work
from dynamo.common.tensors.relay import (
    REALTIME_PATH,
    SERVER_MODEL,
    SWITCHING,
    RealtimeFrame,
    RelayedPart,
    RelayedRequest,
    relays_http,
    to_tensors,
)
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.http.errors import error_info
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.media.relays import parts_of, pass_on
from dynamo.frontend.api.openai.media.spoken_tokens import SpokenTokens
from dynamo.frontend.api.openai.media.web_socket import ClientSocket
from dynamo.frontend.api.statuses import http_status, log_failure, retry_after_s
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.tensor_responses import TensorResponses

LONGEST_S: Final = 3600.0
"""As long as OpenAI has a conversation last."""
PING_S: Final = 20.0
"""A client from which nothing has come between two pings has left."""
IDLE_S: Final = 600.0
"""A conversation in which neither side has said anything for so long is closed."""
_LAST_WORDS_S = 1.0
_BUFFER_BYTES = 256 * 1024
"""What a connection keeps of a client that is not read, and of messages to it."""
_PATIENCE_S = 5.0
_LONGEST_NAMING = 256 * 1024
"""Events that name a model are read and written anew, in one turn."""

Closing = tuple[int, str]
"""Code and reason of the end of a conversation."""


class _Naming(msgspec.Struct):
    model: str | None = None


class _Heard(msgspec.Struct):
    transcription: _Naming | None = None


class _Audio(msgspec.Struct):
    input: _Heard | None = None


class _SessionUpdate(_Naming):
    audio: _Audio | None = None
    input_audio_transcription: _Naming | None = None
    """As in the protocol before its first final version."""

    def transcribers(self) -> set[str]:
        """Return the models that are to write down what the client says; servers differ in which of two they heed."""
        heard = self.audio.input if self.audio is not None else None
        named = (heard.transcription if heard is not None else None), self.input_audio_transcription
        return {naming.model for naming in named if naming is not None and naming.model is not None}


class _ClientEvent(_Naming):
    session: _SessionUpdate | None = None


_client_events = msgspec.json.Decoder(_ClientEvent)


class Realtime:
    """The endpoint."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, exchange: Exchange) -> None:
        call = exchange.call()
        # Its client may have nothing to say for ten minutes: none may have the buffers of all others so.
        with _arriving(exchange) as hold:
            hold(_BUFFER_BYTES)
            await self._open(exchange, call)

    async def _open(self, exchange: Exchange, call: Call) -> None:
        if exchange.headers.get("content-length", "0") != "0":
            raise InvalidRequest("a request for a WebSocket has no body")
        socket = ClientSocket(exchange)
        latest = asyncio.get_running_loop().time() + LONGEST_S
        deadline = latest if call.deadline is None else min(call.deadline, latest)
        call = msgspec.structs.replace(call, deadline=deadline, request_type=RequestType.STREAM)
        plane = self._edge.plane
        name = name_or_only_model(plane, exchange.account, exchange.query.get("model"), relays_http)
        await plane.names.serve(call, name, partial(self._respond, exchange, socket), has_begun=exchange.has_begun)

    async def _respond(self, exchange: Exchange, socket: ClientSocket, model: NamedModel, call: Call) -> None:
        if not relays_http(model.card):
            raise InvalidRequest(
                f"model '{model.card.name}' has no {REALTIME_PATH}: that takes a model behind --remote-kind relay", param="model"
            )
        known = model.card.labels.get(SERVER_MODEL, model.card.name)
        session = secrets.token_hex(16)
        opening = RealtimeFrame(session, urlencode({**exchange.query, "model": known}))
        call = msgspec.structs.replace(call, shadows=())  # nothing would listen to a copy
        request = _request(opening, model)
        async with exchange.attended(), self._edge.plane.infer_stream(model, request, call) as responses:
            parts = parts_of(responses)
            first = await anext(parts, None)
            if first is None or first.status != SWITCHING:
                return await pass_on(exchange, first, parts)
            await socket.open()
            await _Talk(exchange, socket, model, known, session, responses).run(parts)


class _Talk:
    """A conversation that is open."""

    def __init__(
        self,
        exchange: Exchange,
        socket: ClientSocket,
        model: NamedModel,
        known: str,
        session: str,
        responses: TensorResponses,
    ) -> None:
        self._exchange = exchange
        self._socket = socket
        self._model = model
        self._known = known
        """The model's name at its server."""
        self._session = session
        self._responses = responses
        self._number = 0
        self._tokens = SpokenTokens()
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        """When something was said."""

    async def run(self, parts: AsyncGenerator[RelayedPart, None]) -> None:
        """Let both sides talk until one of them, or a failure, ends it; the client is told which."""
        try:
            end = await self._end(parts)
        except asyncio.CancelledError:
            await self._socket.leave(1001, "the server stops")  # or the client has left, and hears nothing
            raise
        if isinstance(end, DynamoError):
            end = await self._tell(end)
        await self._socket.close(*end)

    async def _end(self, parts: AsyncGenerator[RelayedPart, None]) -> Closing | DynamoError:
        """Return how the conversation ends, when it does."""
        async with asyncio.TaskGroup() as tasks:
            speaking = tasks.create_task(self._ended(self._listen(parts)))
            sides = {speaking, *(tasks.create_task(self._ended(side)) for side in (self._pass_on_client(), self._keep_alive()))}
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            end = (speaking if speaking in done else done.pop()).result()
            if not speaking.done():
                await asyncio.wait((speaking,), timeout=_LAST_WORDS_S)
            if isinstance(end, DynamoError) and speaking.done():  # which may be why another side has failed
                end = speaking.result()
            for side in sides:
                side.cancel()
        return end

    async def _ended(self, side: Coroutine[Any, Any, Closing]) -> Closing | DynamoError:
        try:
            return await side
        except DynamoError as error:
            return error

    async def _listen(self, parts: AsyncGenerator[RelayedPart, None]) -> Closing:
        """Pass on what the server says."""
        closing: Closing | None = None
        async for part in parts:
            frame = RealtimeFrame.decode(part.body)
            with self._exchange.holding() as hold:
                hold(2 * len(part.body))
                for message in frame.messages:
                    self._last_s = self._loop.time()
                    if self._tokens.read(message):
                        self._responses.used(self._tokens.input, self._tokens.output)
                    await self._socket.send(message)
            closing = frame.close or closing
        if closing is None:
            raise EngineError("the model ended the conversation without a word")
        return closing

    async def _pass_on_client(self) -> Closing:
        """Pass on what the client says."""
        while True:
            with _arriving(self._exchange) as hold:
                messages = await self._socket.receive(hold)
                if not messages:
                    return await self._leave(*self._socket.closed_with)
                self._last_s = self._loop.time()
                await self._until_allowed()
                await self._exchange.settings.steps.run(self._name_all(messages))
                await self._say(RealtimeFrame(self._session, messages=tuple(messages)))

    def _name_all(self, messages: list[str]) -> Work[None]:
        """Put what `_named` returns in the places of events, of which a client may send thousands at once."""
        for index, message in enumerate(messages):
            messages[index] = self._named(message)
            yield 0

    async def _say(self, frame: RealtimeFrame) -> None:
        self._number += 1
        await self._responses.send(_request(msgspec.structs.replace(frame, number=self._number), self._model))

    async def _leave(self, code: int, reason: str) -> Closing:
        await self._say(RealtimeFrame(self._session, close=(code, reason)))
        return code, reason

    async def _until_allowed(self) -> None:
        """Wait for a moment until the key has tokens left. Raises RateLimited if that takes longer."""
        while True:
            try:
                return self._exchange.account.check_tokens()
            except RateLimited as error:
                wait_s = retry_after_s(error) or _PATIENCE_S
                if wait_s > _PATIENCE_S:
                    raise
                await asyncio.sleep(wait_s)

    def _named(self, message: str) -> str:
        """Return an event with the model's name as the server knows it.

        Raises InvalidRequest for another model, Forbidden for one to transcribe with that the key may not use.
        """
        if '"model"' not in message and "\\u" not in message:  # by which a name may be written in another way
            return message
        try:
            event = _client_events.decode(message)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"an event cannot be read: {error}") from None
        if event.session is not None:
            for transcriber in event.session.transcribers() - {self._known}:
                self._exchange.account.permit(transcriber)
        named = [each for each in (event.model, event.session and event.session.model) if each is not None]
        if not named and event.session is None:
            return message
        if any(each not in (self._model.name, self._model.card.name, self._known) for each in named):
            raise InvalidRequest(f"this conversation is with the model '{self._model.name}' only", param="model")
        if len(message) > _LONGEST_NAMING:
            raise InvalidRequest(f"an event that names a model may have {_LONGEST_NAMING} characters")
        try:
            return _renamed(message, self._known)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in brackets
            raise InvalidRequest(f"an event cannot be read: {error}") from None

    async def _keep_alive(self) -> Closing:
        while True:
            self._socket.has_news = False
            await self._socket.ping()
            await asyncio.sleep(PING_S)
            if self._loop.time() - self._last_s > IDLE_S:
                return await self._leave(1001, "idle")
            if not self._socket.has_news:
                return await self._leave(1001, "no response to a ping")

    async def _tell(self, error: DynamoError) -> Closing:
        """Send the failure as an event, and return the code that says the same."""
        log_failure(error, self._exchange.ensure_id(), f"GET {REALTIME_PATH}")
        info = msgspec.to_builtins(error_info(error, http_status(error, self._exchange.settings.overload)))
        event = {"type": "error", "event_id": f"event_{secrets.token_hex(8)}", "error": {**info, "event_id": None}}
        await self._socket.send(json.dumps(event))
        if isinstance(error, DeadlineExceeded):
            return 1001, "the conversation has lasted as long as it may"
        if isinstance(error, InvalidRequest):
            return 1008, "the request is invalid"
        if isinstance(error, Forbidden):
            return 1008, "the request is not allowed"
        return (1013, "try again later") if isinstance(error, Overloaded) else (1011, "the server failed")


def _arriving(exchange: Exchange) -> AbstractContextManager[Callable[[int], None]]:
    """Give a function that holds bytes during the body, in the share of what waits for clients of the request's key."""
    assert exchange.occupancy is not None, "a conversation counts as a request"
    return exchange.occupancy.arriving(exchange.account.name, stays_held=False)


def _request(frame: RealtimeFrame, model: NamedModel) -> TensorRequest:
    return to_tensors(RelayedRequest(REALTIME_PATH, "application/msgpack", frame.encode()), model.name)


def _renamed(message: str, model: str) -> str:
    """Return an event with its models renamed, its own and that of its session. Of a key that is given twice the last is left.

    Raises ValueError and RecursionError for what Python does not read.
    """
    event: dict[str, Any] = json.loads(message)
    for each in (event, event.get("session") or {}):
        if each.get("model") is not None:
            each["model"] = model
    return json.dumps(event)
