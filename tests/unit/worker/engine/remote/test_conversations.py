"""Conversations over WebSockets with a server, as the relay has them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from dynamo.common.http.client import HttpClient
from dynamo.common.process.steps import Steps
from dynamo.common.tensors.relay import RealtimeFrame, RelayedPart
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.remote.conversations import Conversations
from tests.support.realtime_server import RealtimeServer
from tests.support.waiting import WAIT_S, counting_turns, until

CREATE = '{"type":"response.create"}'


@asynccontextmanager
async def conversing(server: RealtimeServer) -> AsyncIterator[Conversations]:
    async with server.serving():
        steps = Steps(itertools.count(0.0, 0.003).__next__)  # one piece of work a step
        yield Conversations(HttpClient(server.url, key="secret", timeout_s=WAIT_S), steps)


def parts(conversations: Conversations, frame: RealtimeFrame) -> AsyncGenerator[RelayedPart, None]:
    return conversations.serve(frame.encode(), Context("r"))


async def said(opened: AsyncGenerator[RelayedPart, None]) -> RealtimeFrame:
    async with asyncio.timeout(WAIT_S):
        return RealtimeFrame.decode((await anext(opened)).body)


async def say(conversations: Conversations, *messages: str, number: int, session: str = "s") -> None:
    frame = RealtimeFrame(session, number=number, messages=messages)
    assert [part.body async for part in parts(conversations, frame)] == [b""]


async def test_what_arrives_twice_is_passed_on_once_and_leaving_ends_the_conversation() -> None:
    server = RealtimeServer()
    async with conversing(server) as conversations:
        async with aclosing(parts(conversations, RealtimeFrame("s", "model=m"))) as opened:
            assert (await anext(opened)).status == 101
            assert json.loads((await said(opened)).messages[0])["type"] == "session.created"
            for _ in range(2):
                await say(conversations, CREATE, number=1)
            await say(conversations, CREATE, CREATE, number=2)
            assert sum([len((await said(opened)).messages) for _ in range(9)]) == 9
            assert len(server.events) == 3 and server.open == 1
            with pytest.raises(InvalidRequest, match="opened once"):
                await anext(parts(conversations, RealtimeFrame("s", "model=m")))
        await until(lambda: server.open == 0)
        with pytest.raises(Unavailable, match="has ended"):
            await say(conversations, CREATE, number=3)
    assert server.headers[0]["authorization"] == "Bearer secret" and server.headers[0]["x-request-id"] == "r"


async def test_thousands_of_messages_that_are_passed_on_at_once_leave_turns_to_others() -> None:
    server = RealtimeServer()
    async with conversing(server) as conversations, aclosing(parts(conversations, RealtimeFrame("s"))) as opened:
        await anext(opened)
        async with counting_turns() as turns:
            await say(conversations, *(f'{{"type":"x","number":{number}}}' for number in range(3200)), number=1)
        assert turns[0] >= 200
        await until(lambda: len(server.events) == 3200)
    assert [event["number"] for event in server.events] == list(range(3200))


@pytest.mark.parametrize("messages", [1, 2])
async def test_what_is_said_to_a_server_that_has_left_is_refused(messages: int) -> None:
    server = RealtimeServer()
    async with conversing(server) as conversations, aclosing(parts(conversations, RealtimeFrame("s"))) as opened:
        await anext(opened)
        await say(conversations, '{"type":"leave"}', number=1)
        await until(lambda: server.open == 0)
        with pytest.raises(Unavailable, match="has ended"):
            await say(conversations, *[CREATE] * messages, number=2)


@pytest.mark.parametrize(("status", "error"), [(401, EngineError), (429, Overloaded), (503, Overloaded)])
async def test_what_a_server_says_of_itself_is_an_error_that_another_instance_may_make_good(
    status: int, error: type[Exception]
) -> None:
    async with conversing(RealtimeServer(refusals=[status])) as conversations:
        with pytest.raises(error):
            await anext(parts(conversations, RealtimeFrame("s")))


async def test_a_server_that_is_not_there_is_unavailable_and_no_frame_is_refused() -> None:
    server = RealtimeServer()
    async with conversing(server) as conversations:
        pass
    with pytest.raises(Unavailable, match="opens no WebSocket"):
        await anext(parts(conversations, RealtimeFrame("s")))
    with pytest.raises(InvalidRequest, match="is no frame"):
        await anext(conversations.serve(b"\xff", Context("r")))


async def test_a_server_sends_its_worker_nowhere_else() -> None:
    other = RealtimeServer()
    async with other.serving():

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 302 Found\r\nlocation: ws://127.0.0.1:{other.port}\r\ncontent-length: 0\r\n\r\n".encode())
            writer.close()

        async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            conversations = Conversations(HttpClient(url, key="secret", timeout_s=WAIT_S), Steps())
            [part] = [part async for part in parts(conversations, RealtimeFrame("s", "model=m"))]
        assert part.status == 302 and other.headers == []
