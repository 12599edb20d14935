"""What an instance says when it is queried whether it is there, and what its silence means."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    DeadlineExceeded,
    DynamoError,
    InstanceGone,
    Overloaded,
    ShuttingDown,
    Unsupported,
)
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.names import InstanceId
from dynamo.frontend.fleet.presence import RECONNECT_GRACE_S, Presence, Silent, Unknown
from tests.support.fakes import FakeLink, instance
from tests.support.virtual_time import in_virtual_time

ONE = instance(1)


class Worker:
    def __init__(self, response: bytes | DynamoError, takes_s: float = 0.0) -> None:
        self._response = response
        self._takes_s = takes_s

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        assert (instance, verb) == (ONE, "ping")
        await asyncio.sleep(self._takes_s)
        if isinstance(self._response, DynamoError):
            raise self._response
        return self._response


@pytest.mark.parametrize(
    ("response", "served"),
    [
        (msgspec.msgpack.encode(["a", "b"]), ["a", "b"]),
        (msgspec.msgpack.encode([]), []),
        (ShuttingDown("the worker"), ()),
        (b"", None),
        (b"\xff", None),
        (msgspec.msgpack.encode([""] * (2**17 + 1)), None),
        (Unsupported("the verb 'ping'"), None),
        (Overloaded("too many requests"), None),
    ],
)
async def test_an_instance_that_responds_is_there_and_may_say_what_it_serves(
    response: bytes | DynamoError, served: object
) -> None:
    assert await Presence(Worker(response), FakeLink()).served_by(ONE) == served


@pytest.mark.parametrize("response", [InstanceGone(InstanceId(1)), DeadlineExceeded()])
async def test_an_instance_that_does_not_respond_is_silent(response: DynamoError) -> None:
    with pytest.raises(Silent):
        await Presence(Worker(response), FakeLink()).served_by(ONE)


@in_virtual_time
async def test_while_our_own_connection_is_away_and_shortly_after_silence_says_nothing() -> None:
    link = FakeLink()
    presence = Presence(Worker(InstanceGone(InstanceId(1))), link)
    link.cut()
    with pytest.raises(Unknown):
        await presence.served_by(ONE)
    link.restore()
    await asyncio.sleep(RECONNECT_GRACE_S)
    with pytest.raises(Unknown):
        await presence.served_by(ONE)
    await asyncio.sleep(2 * RECONNECT_GRACE_S)
    with pytest.raises(Silent):
        await presence.served_by(ONE)
    link.is_silent = True
    with pytest.raises(Unknown):
        await presence.served_by(ONE)
