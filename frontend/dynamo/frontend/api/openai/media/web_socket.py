"""A WebSocket to a client, over the connection of the HTTP request that asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.http.served import ServedRequest
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.relay import MAX_MESSAGE_BYTES
from dynamo.frontend.api.http.exchange import Exchange

_SUBPROTOCOL = Subprotocol("realtime")
_COPIES = 3
"""A message that is received is held as its frames, the message, and the request that it becomes."""
_SLICE_BYTES = 1024
"""Read between two yields: 170 of the smallest frames, which take 2 ms."""
_CLOSE_S = 2.0
_LEAVE_S = 0.5
_REASON_CHARACTERS = 30
"""The reason of a close frame has 123 bytes at most."""


class ClientSocket:
    """One WebSocket. Messages are not compressed."""

    def __init__(self, exchange: Exchange) -> None:
        """Raises InvalidRequest for a request that asks for no WebSocket."""
        handshake = ServerProtocol(select_subprotocol=_choose)
        response = handshake.accept(Request(exchange.path, Headers(exchange.headers), exchange.method))
        if response.status_code != 101:
            raise InvalidRequest(f"this path takes WebSockets: {bytes(response.body).decode().splitlines()[0]}")
        self._exchange = exchange
        self._headers = [
            (name.lower().encode(), value.encode()) for name, value in response.headers.raw_items() if name.lower() != "date"
        ]
        self._protocol = ServerProtocol(state=OPEN, max_size=MAX_MESSAGE_BYTES)
        self._request: ServedRequest | None = None
        self._pieces: list[bytes] = []
        """The frames that have come of a message."""
        self.has_news = True
        """Whether anything has come since it was set to False."""

    async def open(self) -> None:
        """Accept it."""
        self._request = await self._exchange.upgrade(self._headers)

    async def receive(self, hold: Callable[[int], None]) -> list[str]:
        """Return the messages that have come, at least one; [] if the client has closed it, or sent what is none.

        `hold` counts what they take. Raises Overloaded.
        """
        assert self._request is not None, "the WebSocket is open"
        messages: list[str] = []
        while not messages and self._protocol.state is OPEN:
            data = await self._request.read()
            if data is None:
                break
            hold(_COPIES * len(data))
            self.has_news = True
            reading = self._read(data, messages)
            if len(data) <= _SLICE_BYTES:
                finish(reading)
            else:
                await self._exchange.settings.steps.run(reading)  # there may be ten thousand frames
            await self._write()
        return messages

    def _read(self, data: bytes, messages: list[str]) -> Work[None]:
        """Add the messages that end with `data`."""
        for begin in range(0, len(data), _SLICE_BYTES):
            self._protocol.receive_data(data[begin : begin + _SLICE_BYTES])
            messages += self._messages()
            yield 0

    def _messages(self) -> list[str]:
        messages: list[str] = []
        for event in self._protocol.events_received():
            if not isinstance(event, Frame) or event.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                continue
            if event.opcode is Opcode.BINARY:
                self._protocol.fail(CloseCode.UNSUPPORTED_DATA, "messages are JSON, as text")
                break
            self._pieces.append(bytes(event.data))
            if not event.fin:
                continue
            message = b"".join(self._pieces)
            self._pieces.clear()
            try:
                messages.append(message.decode())
            except UnicodeDecodeError:
                self._protocol.fail(CloseCode.INVALID_DATA, "text that is not UTF-8")
                break
        return messages

    async def send(self, message: str) -> None:
        """Send a message. Waits while the client is slow; does nothing once it has closed."""
        if self._protocol.state is OPEN:
            self._protocol.send_text(message.encode())
            await self._write()

    async def ping(self) -> None:
        if self._protocol.state is OPEN:
            self._protocol.send_ping(b"")
            await self._write()

    @property
    def closed_with(self) -> tuple[int, str]:
        """Code and reason of the client, which has closed it."""
        received = self._protocol.close_rcvd
        return (1000, "") if received is None or received.code == 1005 else (received.code, received.reason)

    async def close(self, code: int, reason: str) -> None:
        """Close it, with the code unless the client has closed it. A client that does not do so in a moment is cut off."""
        request = self._request
        assert request is not None, "the WebSocket is open"
        if self._protocol.state is OPEN:
            self._protocol.send_close(code, reason[:_REASON_CHARACTERS])
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._write()
                while self._protocol.close_rcvd is None and (data := await request.read()) is not None:
                    self._protocol.receive_data(data)
                    self._protocol.events_received()
                await request.write(b"", is_last=True)

    async def leave(self, code: int, reason: str) -> None:
        """Close it without waiting for the client, who may have left."""
        if self._request is not None and self._protocol.state is OPEN:
            self._protocol.send_close(code, reason)
            with suppress(TimeoutError, DynamoError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._write()

    async def _write(self) -> None:
        assert self._request is not None, "the WebSocket is open"
        if data := b"".join(self._protocol.data_to_send()):
            await self._request.write(data)


def _choose(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return _SUBPROTOCOL if _SUBPROTOCOL in offered else None
