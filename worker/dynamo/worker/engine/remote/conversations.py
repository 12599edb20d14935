"""Conversations over WebSockets with a server: see `dynamo.common.tensors.relay`.

One request opens a conversation, and its responses are what the server says, until one side closes it. Further requests have what
the client says; each ends when the server has taken that, so a server that reads slowly slows down its client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidState, InvalidStatus

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.http.client import HttpClient
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.common.tensors.relay import MAX_MESSAGE_BYTES, REALTIME_PATH, SWITCHING, RealtimeFrame, RelayedPart
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.remote.errors import OF_SERVER, failure_of

_OPEN_S = 5.0
_CLOSE_S = 1.0
_WAITING_MESSAGES = 4
"""Messages of the server that wait for the client to read, at most; more stay in the connection."""
_TOGETHER = 16
"""Messages of a client that are written between two yields, in half a millisecond if they are small."""
_NO_CODE: Final = (1005, 1006)
"""Say that there is no code; they are not sent."""


class Conversations:
    """The conversations with one server that are open."""

    def __init__(self, client: HttpClient, steps: Steps) -> None:
        """Floods of messages are passed on in `steps`."""
        self._client = client
        self._open: dict[str, _ServerSocket] = {}
        self._steps = steps

    async def serve(self, body: Buffer, context: Context) -> AsyncGenerator[RelayedPart, None]:
        """Yield what the server says if `body` opens a conversation, else pass on what the client says. Raises DynamoError."""
        frame = RealtimeFrame.decode(body)
        if frame.number:
            conversation = self._open.get(frame.session)
            if conversation is None:
                raise Unavailable("the conversation has ended")
            await conversation.say(frame)
            yield RelayedPart(b"")
            return
        if not frame.session or frame.session in self._open:
            raise InvalidRequest("a conversation is opened once, with a name that no other one has")
        try:
            async with self._connected(frame, context) as socket:
                yield RelayedPart(b"", SWITCHING)
                while True:
                    message = await socket.recv()
                    if not isinstance(message, str):
                        raise EngineError("the server sent a binary message, of which there are none in conversations")
                    yield RelayedPart(RealtimeFrame(messages=(message,)).encode())
        except InvalidStatus as error:
            response = error.response
            status, said = response.status_code, bytes(response.body or b"")
            if status in OF_SERVER:
                raise failure_of(self._client, status, said, response.headers.get("retry-after", "")) from None
            yield RelayedPart(said, status, response.headers.get("content-type", "text/plain"))
        except ConnectionClosed as error:
            code, reason = (1011, "the server has left") if error.rcvd is None else (error.rcvd.code, error.rcvd.reason)
            yield RelayedPart(RealtimeFrame(close=(1000 if code in _NO_CODE else code, reason)).encode())
        except (InvalidHandshake, OSError, TimeoutError) as error:
            raise Unavailable(f"the server at {self._client} opens no WebSocket: {error}") from error

    @asynccontextmanager
    async def _connected(self, frame: RealtimeFrame, context: Context) -> AsyncGenerator[ClientConnection, None]:
        url, headers, tls = self._client.websocket(f"{REALTIME_PATH}?{frame.query}")
        opened = _ConnectThere(
            url,
            additional_headers={**headers, "x-request-id": context.request_id},
            user_agent_header=None,
            compression=None,
            proxy=None,
            open_timeout=_OPEN_S,
            close_timeout=_CLOSE_S,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=_WAITING_MESSAGES,
            ssl=tls,
        )
        async with opened as socket:
            self._open[frame.session] = _ServerSocket(socket, self._steps)
            try:
                yield socket
            finally:
                del self._open[frame.session]


class _ConnectThere(connect):
    """Connects to no other place than it was told: a server could name one in its worker's network, which would get its key."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _ServerSocket:
    def __init__(self, socket: ClientConnection, steps: Steps) -> None:
        self._socket = socket
        self._steps = steps
        self._number = 0
        """The number of the last request that was passed on."""

    async def say(self, frame: RealtimeFrame) -> None:
        """Pass on what the client says, unless that was done. Returns when the server has room for more."""
        if frame.number <= self._number:
            return
        self._number = frame.number
        try:
            if frame.messages:
                if len(frame.messages) > 1:  # there may be ten thousand, none of which lets others have their turn
                    await self._steps.run(self._write(frame.messages[:-1]))
                await self._socket.send(frame.messages[-1])  # which waits for room
            if frame.close is not None:
                await self._socket.close(*frame.close)
        except (ConnectionClosed, InvalidState) as error:
            raise Unavailable("the conversation has ended") from error

    def _write(self, messages: Sequence[str]) -> Work[None]:
        for begin in range(0, len(messages), _TOGETHER):
            for message in messages[begin : begin + _TOGETHER]:
                self._socket.protocol.send_text(message.encode())
            self._socket.transport.write(b"".join(self._socket.protocol.data_to_send()))
            yield 0
