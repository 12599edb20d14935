"""Requests to JetStream when the connection is lost: nats-py goes on waiting for their responses."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NoReturn, cast

import pytest
from nats.js.api import StreamConfig, StreamInfo, StreamState

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.nats.connection import Connection


class JetStream:
    """Gets requests, and never responds."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    async def never(self, *args: object, **options: object) -> NoReturn:
        self.requested.set()
        await asyncio.Event().wait()
        raise AssertionError

    add_stream = stream_info = purge_stream = object_store = key_value = never


class LossyJetStream(JetStream):
    """Responds just when the caller is cancelled, which is lost by that, as in nats-py before Python 3.12."""

    async def stream_info(self, name: str, subjects_filter: str = "") -> StreamInfo:  # type: ignore[override]
        self.requested.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return StreamInfo(config=StreamConfig(name=name), state=StreamState(0, 0, 0, 0, 0))


class FakeConnection:
    def __init__(self) -> None:
        self.cut = asyncio.Event()
        self.client = self
        self.requests: JetStream = JetStream()

    def jetstream(self) -> JetStream:
        return self.requests

    async def lost(self) -> None:
        await self.cut.wait()


@pytest.mark.parametrize("request_name", ["ensure", "count", "purge", "load", "save", "forget", "lock"])
async def test_a_request_ends_with_the_connection(request_name: str) -> None:
    connection = FakeConnection()
    stream = KvStream(cast("Connection", connection))

    async def locked() -> None:
        async with stream.lock("x"):
            pass

    requests = {
        "ensure": stream.ensure,
        "count": lambda: stream.count("x"),
        "purge": lambda: stream.purge("x"),
        "load": lambda: stream.load("x"),
        "save": lambda: stream.save("x", b""),
        "forget": lambda: stream.forget("x"),
        "lock": locked,
    }
    async with asyncio.timeout(120):
        request = asyncio.ensure_future(requests[request_name]())
        await connection.requests.requested.wait()
        connection.cut.set()
        with pytest.raises(Unavailable, match="the connection to NATS is lost"):
            await request


async def test_a_request_whose_response_comes_together_with_its_cancellation_is_cancelled() -> None:
    """Otherwise its task goes on, and the caller that closes it waits for ever."""
    connection = FakeConnection()
    connection.requests = LossyJetStream()
    counting = asyncio.ensure_future(KvStream(cast("Connection", connection)).count("x"))
    async with asyncio.timeout(120):
        await connection.requests.requested.wait()
        counting.cancel()
        await asyncio.wait({counting})
    assert counting.cancelled()
