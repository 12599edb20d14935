"""What comes over a WebSocket is read in turns with all else that the process does."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.common.process.steps import Steps
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.openai.media.web_socket import ClientSocket
from tests.support.waiting import counting_turns

SMALLEST = {"pong": b"\x8a\x80\0\0\0\0", "ping": b"\x89\x80\0\0\0\0", "message": b"\x81\x80\0\0\0\0"}
"""Frames of a client, with empty bodies."""
FRAMES = 8192


class Client:
    """A request that has become a WebSocket, over which these bytes have come."""

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data
        self.written: list[bytes] = []

    async def read(self) -> bytes | None:
        data, self._data = self._data, None
        return data

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self.written.append(data)


@pytest.mark.parametrize("kind", SMALLEST)
async def test_thousands_of_frames_that_come_at_once_leave_turns_to_others(kind: str) -> None:
    client = Client(SMALLEST[kind] * FRAMES)

    async def upgrade(headers: object) -> Client:
        return client

    names = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    headers = {**names, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
    settings = SimpleNamespace(steps=Steps(itertools.count(0.0, 0.003).__next__))  # one piece of work a step
    exchange: Any = SimpleNamespace(path="/", method="GET", headers=headers, settings=settings, upgrade=upgrade)
    socket = ClientSocket(exchange)
    await socket.open()
    async with counting_turns() as turns:
        messages = await socket.receive(hold_nothing)
    assert messages == ([""] * FRAMES if kind == "message" else [])
    assert len(client.written) == (kind == "ping"), "pongs go out together"
    assert turns[0] >= len(SMALLEST[kind]) * FRAMES // 1024
