"""Conversations of clients that are slow, silent or gone, with a model in the test's process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from dynamo.common.errors import InstanceGone
from dynamo.common.tensors.relay import RealtimeFrame, RelayedPart, from_tensors, part_to_outputs
from dynamo.common.tensors.request import TensorRequest, build_response
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.config import CapacityOptions, HttpOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.ledger import UsageCounts
from dynamo.frontend.security.surfaces import Scope
from tests.support.every_operation import MEDIA, Frontend, open_frontend
from tests.support.fakes import FakeStream
from tests.support.waiting import WAIT_S, until, until_free

Talk = Callable[[str], Awaitable[ClientConnection]]


@dataclass
class Model:
    """Takes a conversation, and keeps what clients say."""

    opened: list[FakeStream] = field(default_factory=list)
    frames: list[RealtimeFrame] = field(default_factory=list)

    def __call__(self, stream: FakeStream) -> None:
        frame = RealtimeFrame.decode(from_tensors(TensorRequest.parse(stream.body)).body)
        self.frames.append(frame)
        if frame.number == 0:
            self.opened.append(stream)
            return self.send(RelayedPart(b"", 101))
        if frame.close is not None:
            self.say(close=frame.close)
            self.opened[-1].end()
        self._write(stream, RelayedPart(b""))
        stream.end()

    def say(self, *messages: str, close: tuple[int, str] | None = None) -> None:
        self.send(RelayedPart(RealtimeFrame(messages=messages, close=close).encode()))

    def send(self, part: RelayedPart) -> None:
        self._write(self.opened[-1], part)

    def _write(self, stream: FakeStream, part: RelayedPart) -> None:
        head, raws = part_to_outputs(part)
        stream.data(b"".join(build_response(head, raws)))


@asynccontextmanager
async def talking(keys: Path | None = None, **headers: str) -> AsyncIterator[tuple[Frontend, Model, ClientConnection]]:
    async with open_frontend(keys) as front, serve_http(HttpOptions(port=0), front.app) as server:
        model = Model()
        front.engine.behaves = [model]
        url = f"ws://127.0.0.1:{server.port}/v1/realtime?model={MEDIA.open}"
        async with connect(url, proxy=None, ping_interval=None, max_size=None, additional_headers=headers) as socket:
            yield front, model, socket
        await until_free(front.capacity)


async def end_of(socket: ClientConnection) -> tuple[int | None, str | None]:
    async with asyncio.timeout(WAIT_S):
        await socket.wait_closed()
    return socket.close_code, socket.close_reason


async def test_messages_go_both_ways_in_their_order_to_the_instance_that_has_the_conversation() -> None:
    async with talking() as (front, model, socket):
        for number in range(20):
            await socket.send(f'{{"type":"a","number":{number}}}')
        await until(lambda: sum(len(frame.messages) for frame in model.frames) == 20)
        said = [json.loads(message)["number"] for frame in model.frames for message in frame.messages]
        assert said == list(range(20)) and [frame.number for frame in model.frames] == list(range(len(model.frames)))
        assert {stream.instance for stream in front.requests} == {model.opened[0].instance}
        model.say("1", "2")
        model.say("3")
        assert [await socket.recv() for _ in range(3)] == ["1", "2", "3"]
        await socket.close(4000, "enough")
        assert model.frames[-1].close == (4000, "enough")


@pytest.mark.parametrize(("idle_s", "reason"), [(0.0, "idle"), (600.0, "no response to a ping")])
async def test_a_conversation_that_is_idle_or_whose_client_is_silent_is_closed(
    idle_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.api.openai.media.realtime.PING_S", 0.2)
    monkeypatch.setattr("dynamo.frontend.api.openai.media.realtime.IDLE_S", idle_s)
    async with talking() as (_, model, socket):
        if idle_s:
            socket.transport.pause_reading()
            await until(lambda: model.frames[-1].close is not None)
            socket.transport.resume_reading()
        assert await end_of(socket) == (1001, reason)
        assert model.frames[-1].close == (1001, reason)


async def test_a_client_that_answers_pings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.api.openai.media.realtime.PING_S", 0.2)
    pings = 0

    def counted(data: Any) -> None:
        nonlocal pings
        pings += 1

    async with talking() as (_, model, socket):
        protocol = socket.protocol
        original = protocol.recv_frame
        monkeypatch.setattr(protocol, "recv_frame", lambda frame: (counted(frame), original(frame)))
        await until(lambda: pings >= 4)
        assert model.frames[-1].close is None


async def test_a_model_that_is_lost_ends_the_conversation_with_an_event() -> None:
    async with talking() as (front, model, socket):
        model.opened[0].fail(InstanceGone(model.opened[0].instance))
        event = json.loads(await socket.recv())
        assert (event["type"], event["error"]["type"]) == ("error", "service_unavailable")
        assert (await end_of(socket))[0] == 1011
        assert len(front.requests) == 1


async def test_a_client_that_does_not_close_its_side_is_cut_off_and_holds_nothing() -> None:
    async with talking() as (front, model, socket):
        socket.transport.pause_reading()  # so it does not see the end, nor responds to it
        model.say(close=(1000, "over"))
        model.opened[0].end()
        await until_free(front.capacity)
        socket.transport.resume_reading()
        await end_of(socket)


async def test_a_frontend_that_stops_says_so_before_it_cuts_a_conversation() -> None:
    async with open_frontend() as front, serve_http(HttpOptions(port=0), front.app) as server:
        model = Model()
        front.engine.behaves = [model]
        url = f"ws://127.0.0.1:{server.port}/v1/realtime?model={MEDIA.open}"
        async with connect(url, proxy=None, ping_interval=None) as socket:
            await server.stop(0.0)
            assert await end_of(socket) == (1001, "the server stops")
        await until_free(front.capacity)


async def test_a_long_message_is_held_while_it_comes_and_let_go_of_when_it_has_been_passed_on() -> None:
    async with talking() as (front, model, socket):
        before = front.capacity.buffered_bytes
        await socket.send("a" * (2 << 20))
        await until(lambda: len(model.frames) == 2)
        assert front.capacity.peak_bytes >= before + (4 << 20)
        await until(lambda: front.capacity.buffered_bytes == before)


@pytest.mark.parametrize(
    "event",
    [
        '{"type":"session.update","session":{"model":"other"}}',
        '{"type":"session.update","session":{"\\u006dodel":"other"}}',
        '{"type":"session\\u002eupdate","\\u0073ession":{"model":"other"}}',
        '{"type":"x","model":"other"}',
        '{"type":"x","model":"other","nothing":NaN}',
        '{"type":"x","session":{"model":null},"number":' + "1" * 5000 + "}",
        '{"type":"x","session":{"model":null},"deep":' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
async def test_no_event_names_another_model_however_it_is_written(event: str) -> None:
    async with talking() as (_, model, socket):
        await socket.send('{"type":"x","text":"\\u00e9"}')
        await socket.send('{"model":"other","type":"session.update","model":"' + MEDIA.open + '"}')
        await socket.send('{"session":{"model":"other"},"session":{}}')  # some servers would take both for one
        await until(lambda: sum(len(frame.messages) for frame in model.frames) == 3)
        assert json.loads([message for frame in model.frames for message in frame.messages][2]) == {"session": {}}
        renamed = json.loads([message for frame in model.frames for message in frame.messages][1])
        assert renamed == {"type": "session.update", "model": MEDIA.open}
        await socket.send(event)
        assert json.loads(await socket.recv())["error"]["type"] == "invalid_request_error"
        assert (await end_of(socket))[0] == 1008
        assert sum(len(frame.messages) for frame in model.frames) == 3


@pytest.mark.parametrize(
    "session",
    [
        {"audio": {"input": {"transcription": {"model": "%s"}}}},
        {"input_audio_transcription": {"model": "%s"}, "audio": {"input": {"transcription": None}}},
    ],
)
@pytest.mark.parametrize("with_another", [False, True])
async def test_no_key_has_its_speech_written_down_by_a_model_that_it_may_not_use(
    tmp_path: Path, session: dict[str, Any], with_another: bool
) -> None:
    key = make_key()
    (tmp_path / "keys.yaml").write_text(entry_for(key, "some", scopes=[Scope.INFER], models=[MEDIA.open, "whisper*"]))
    event = json.dumps({"type": "session.update", "session": session})
    authorization = f"Bearer {key}"
    async with asyncio.timeout(WAIT_S), talking(tmp_path / "keys.yaml", Authorization=authorization) as (_, model, socket):
        await socket.send(event % "whisper-1")
        await until(lambda: sum(len(frame.messages) for frame in model.frames) == 1)
        both = {"audio": {"input": {"transcription": {"model": MEDIA.open}}}, "input_audio_transcription": {"model": "%s"}}
        await socket.send((json.dumps({"session": both}) if with_another else event) % "other")
        assert json.loads(await socket.recv())["error"]["type"] == "permission_error"
        assert (await end_of(socket))[0] == 1008
        assert sum(len(frame.messages) for frame in model.frames) == 1


@asynccontextmanager
async def talking_keys(folder: Path, max_buffered_bytes: int) -> AsyncIterator[tuple[Model, Talk]]:
    """Give the model, and a function that opens a conversation of the key `some` or `other`."""
    keys = {name: make_key() for name in ("some", "other")}
    (folder / "keys.yaml").write_text("".join(entry_for(key, name, scopes=[Scope.INFER]) for name, key in keys.items()))
    async with (
        open_frontend(folder / "keys.yaml", capacity=CapacityOptions(max_buffered_bytes=max_buffered_bytes)) as front,
        serve_http(HttpOptions(port=0), front.app) as server,
        AsyncExitStack() as conversations,
    ):
        model = Model()
        front.engine.behaves = [model]

        async def talk(name: str) -> ClientConnection:
            url, headers = (
                f"ws://127.0.0.1:{server.port}/v1/realtime?model={MEDIA.open}",
                {"Authorization": f"Bearer {keys[name]}"},
            )
            return await conversations.enter_async_context(
                connect(url, proxy=None, ping_interval=None, additional_headers=headers)
            )

        yield model, talk


async def test_conversations_of_one_key_leave_buffers_for_the_requests_of_others(tmp_path: Path) -> None:
    """One that says nothing costs its client nothing, and is not closed for ten minutes."""
    async with talking_keys(tmp_path, (2 << 20) + (128 << 10)) as (_, talk):
        for _ in range(4):
            await talk("some")
        with pytest.raises(InvalidStatus) as refusal:
            await talk("some")
        assert refusal.value.response.status_code == 429
        await talk("other")


async def test_messages_of_one_key_that_do_not_come_whole_leave_room_for_those_of_others(tmp_path: Path) -> None:
    async def stalls() -> AsyncIterator[str]:
        yield "a" * (1 << 20)
        await asyncio.Event().wait()

    async with talking_keys(tmp_path, 8 << 20) as (model, talk):
        sockets = [await talk("some") for _ in range(3)]
        sending = [asyncio.create_task(socket.send(stalls())) for socket in sockets]
        closed = [asyncio.create_task(socket.wait_closed()) for socket in sockets]
        await asyncio.wait(closed, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        other = await talk("other")
        said = len(model.frames)
        await other.send("a" * (1 << 20))
        await until(lambda: len(model.frames) > said)
        for task in (*sending, *closed):
            task.cancel()
        await asyncio.wait((*sending, *closed))


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ('{"type":"response.done","response":{"usage":{"input_tokens":%s,"output_tokens":3}}}' % ("9" * 30), (1 << 31, 3)),
        ('{"type":"response.done","response":{"metadata":{"a":NaN},"usage":{"input_tokens":7,"output_tokens":3}}}', (7, 3)),
        ('{"type":"response.output_text.delta","response_id":"r","delta":"%s"}' % ("a" * 80), (0, 20)),
    ],
    ids=["absurd", "metadata of the client", "left before the end"],
)
async def test_a_ledger_has_what_a_server_says_of_tokens_and_an_estimate_of_what_it_said_before(
    tmp_path: Path, said: str, tokens: tuple[int, int]
) -> None:
    recorded: list[UsageCounts] = []
    key = make_key()
    (tmp_path / "keys.yaml").write_text(entry_for(key, "some", scopes=[Scope.INFER]))
    async with (
        open_frontend(tmp_path / "keys.yaml", recorded=lambda key, model, usage: recorded.append(usage)) as front,
        serve_http(HttpOptions(port=0), front.app) as server,
    ):
        front.engine.behaves = [model := Model()]
        url, headers = f"ws://127.0.0.1:{server.port}/v1/realtime?model={MEDIA.open}", {"Authorization": f"Bearer {key}"}
        async with connect(url, proxy=None, ping_interval=None, additional_headers=headers) as socket:
            model.say(said)
            assert await socket.recv()
        await until(lambda: recorded)
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in recorded] == [tokens]


async def test_an_event_whose_tokens_cannot_be_counted_ends_the_conversation_in_its_place() -> None:
    async with talking() as (_, model, socket):
        model.say('{"type":"response.done","usage":{"input_tokens":7},"deep":' + "[" * 5000 + "]" * 5000 + "}")
        event = json.loads(await socket.recv())
        assert event["type"] == "error" and "its tokens cannot be counted" in event["error"]["message"]
        assert (await end_of(socket))[0] == 1011
