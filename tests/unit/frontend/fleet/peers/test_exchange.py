"""What all that frontends tell one another has in common."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from dynamo.frontend.fleet.peers.exchange import Paced, Topic
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.virtual_time import in_virtual_time


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    origin: str
    words: str


async def delivered() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_message_reaches_the_others_and_comes_back_to_its_sender_as_a_sign_of_life() -> None:
    bus = FakeBus()
    ours = Topic(FakeConnection(bus), "greetings", Greeting, "us", "a greeting")
    theirs = Topic(FakeConnection(bus), "greetings", Greeting, "them", "a greeting")
    here: list[Greeting] = []
    there: list[Greeting] = []
    own: list[str] = []
    async with ours.received(here.append, on_own=lambda message: own.append("back")), theirs.received(there.append):
        ours.publish(Greeting("us", "hello"))
        await delivered()
    ours.publish(Greeting("us", "are you there?"))
    await delivered()
    assert (here, there, own) == ([], [Greeting("us", "hello")], ["back"])


async def test_what_cannot_be_read_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bus = FakeBus()
    nats = FakeConnection(bus)
    received: list[Greeting] = []
    async with Topic(nats, "greetings", Greeting, "us", "a greeting").received(received.append):
        for garbage in (b"", b"\xc1", msgspec.msgpack.encode(["them"]), msgspec.msgpack.encode([1, "hello"])):
            nats.publish_nowait("greetings", garbage)
        nats.publish_nowait("greetings", msgspec.msgpack.encode(["them", "hello"]))
        await delivered()
    assert received == [Greeting("them", "hello")]
    assert [record.getMessage().split(" was dropped")[0] for record in caplog.records] == ["a greeting on greetings"]


@in_virtual_time
async def test_a_paced_call_comes_at_once_and_then_once_in_an_interval() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    called: list[float] = []
    paced = Paced(1.0, lambda: called.append(round(loop.time() - began, 6)))
    for at in (0.0, 0.0, 0.25, 0.5, 3.0):
        await asyncio.sleep(began + at - loop.time())
        paced.due()
    await asyncio.sleep(5.0)
    assert called == [0.0, 1.0, 3.0]
    paced.due()
    paced.cancel()
    await asyncio.sleep(5.0)
    assert called == [0.0, 1.0, 3.0]
