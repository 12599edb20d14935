"""Responses in the background whose events are stored, and followed from any frontend."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from openai import APIError, AsyncOpenAI

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.messaging.jetstream.records import Record
from dynamo.frontend.api.openai.store.event_log import EventLog, follow
from dynamo.frontend.api.openai.store.events import ResponseObject, event
from dynamo.frontend.api.openai.store.stored import LOST_S, new_response_id
from tests.support.fake_bus import FakeBus
from tests.support.fake_records import FakeRecords
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker
from tests.support.storing import Storing, stored_responses, storing
from tests.support.waiting import until

PATH = "/v1/responses"
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def client_of(s: Storing) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{s.edge.url}/v1", api_key="none", max_retries=0)


async def test_a_streamed_response_in_the_background_is_followed_to_its_end_and_read_again_from_any_event() -> None:
    async with storing(Speaker()) as s, client_of(s) as client:
        events = [
            event async for event in await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        ]
        assert [event.type for event in events] == KINDS
        assert [event.sequence_number for event in events] == list(range(len(KINDS)))
        final: Any = events[-1]
        assert (final.response.status, final.response.output_text) == ("completed", "Hello you")
        for after in (0, 4, len(KINDS) - 2, len(KINDS) - 1, 99):
            again = await client.responses.retrieve(final.response.id, stream=True, starting_after=after)
            assert [event async for event in again] == events[after + 1 :]
        assert [event async for event in await client.responses.retrieve(final.response.id, stream=True)] == events


async def test_a_response_in_the_background_is_announced_before_there_is_anything_of_it() -> None:
    held: list[FakeStream] = []
    async with storing(held.append) as s, client_of(s) as client:
        stream = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        created: Any = await anext(stream)
        assert (created.type, created.sequence_number, created.response.status) == ("response.created", 0, "queued")
        await s.reached(created.response.id, "in_progress")
        Speaker()(held[0])
        assert [event.type async for event in stream] == KINDS[1:]


async def test_who_reads_before_the_end_gets_what_comes() -> None:
    held: list[FakeStream] = []
    async with storing(held.append) as s, client_of(s) as client:
        id = (await s.create(background=True, stream=False))["id"]
        await until(lambda: bool(held))
        reading = asyncio.create_task(_types(client, id))
        Speaker()(held[0])
        assert await reading == ["response.completed"]  # without `stream`, no other event is stored


async def test_a_client_that_leaves_does_not_end_the_response() -> None:
    held: list[FakeStream] = []
    async with storing(held.append) as s, client_of(s) as client:
        creating = asyncio.create_task(client.responses.create(model="talker", input="Hi", background=True, stream=True))
        await until(lambda: bool(held))
        creating.cancel()
        await asyncio.wait([creating])
        Speaker()(held[0])
        (id,) = {key.split(".")[1] for key in s.records.records}
        assert await _types(client, id) == KINDS


async def test_who_follows_a_response_does_not_notice_that_jetstream_is_away_for_a_while() -> None:
    class Failing(FakeRecords):
        failures = 0

        async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
            self.failures += self.is_away
            return await super().get(key, hold)

    held: list[FakeStream] = []
    async with storing(held.append, records=(records := Failing()), look_s=0.01) as s, client_of(s) as client:
        reading = asyncio.create_task(_types_of_new(client))
        await until(lambda: bool(held))
        records.is_away = True
        await until(lambda: records.failures >= 2)
        records.is_away = False
        Speaker()(held[0])
        assert await reading == KINDS


@pytest.mark.parametrize("end", ["fails", "cancelled", "frontend dies"])
async def test_every_stream_ends_with_a_final_event(end: str) -> None:
    held: list[FakeStream] = []
    beat_s, look_s = 0.01 if end == "cancelled" else 60.0, 0.01 if end == "frontend dies" else 60.0
    async with storing(held.append, beat_s=beat_s, look_s=look_s) as s, client_of(s) as client:
        id = (await s.create(background=True))["id"]
        await s.reached(id, "in_progress")
        reading = asyncio.create_task(_types(client, id))
        match end:
            case "fails":
                held[0].fail(EngineError("no more"))
            case "cancelled":
                await client.responses.cancel(id)
            case _:
                s.now[0] += LOST_S + 1
                assert (await stored_responses(s.records).read("", id))["status"] == "failed"  # another frontend
        assert await reading == ["response.cancelled" if end == "cancelled" else "response.failed"]


async def test_who_follows_a_response_reads_each_chunk_once_and_nothing_while_none_comes() -> None:
    stored = stored_responses(records := FakeRecords())
    response = ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, background=True)
    await stored.save("", response, [])
    log = EventLog(stored, "", response)
    async with aclosing(follow(stored, "", response.id, 0)) as chunks, log.writing():
        assert await anext(chunks) == event("response.created", 0, response=response)
        for number in range(3):
            waiting = asyncio.create_task(anext(chunks))
            await _settled()
            records.reads = 0
            await _settled()
            assert records.reads == 0
            log.add([b"%d\n\n" % number])
            assert (await waiting, records.reads) == (b"%d\n\n" % number, 1)
        waiting = asyncio.create_task(anext(chunks))
        await stored.save("", msgspec.structs.replace(response, status="completed"), None)
        assert b"response.completed" in await waiting


@pytest.mark.parametrize("loss", ["all announcements", "every second announcement", "the connection"])
async def test_no_event_is_lost_or_doubled_when_announcements_are(loss: str) -> None:
    bus, numbers = FakeBus(), itertools.count()
    if loss != "the connection":
        bus.is_lost = lambda subject, payload: loss.startswith("all") or next(numbers) % 2 == 0
    held: list[FakeStream] = []
    look_s = 60.0 if loss == "the connection" else 0.01
    async with storing(held.append, bus=bus, look_s=look_s) as s, client_of(s) as client:
        stream = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        events: list[Any] = [await anext(stream)]
        s.nats.is_up = loss != "the connection"
        await s.reached(events[0].response.id, "in_progress")
        Speaker()(held[0])
        await s.reached(events[0].response.id, "completed")
        s.nats.reconnect()
        events += [event async for event in stream]
    assert [event.type for event in events] == KINDS
    assert [event.sequence_number for event in events] == list(range(len(KINDS)))


async def test_an_announcement_that_no_frontend_made_does_no_harm() -> None:
    held: list[FakeStream] = []
    async with storing(held.append, records=(records := FakeRecords())) as s, client_of(s) as client:
        reading = asyncio.create_task(_types_of_new(client))
        await until(lambda: bool(held))
        (id,) = {key.split(".")[1] for key in records.records}
        for payload in (b"999999999999", b"-5", b"many", b"\xff", b""):
            s.nats.publish_nowait(f"dynamo.ns.stored.{id}", payload)
        Speaker()(held[0])
        assert await reading == KINDS


async def test_who_stops_following_leaves_no_subscription() -> None:
    bus = FakeBus()
    async with storing(lambda stream: None, bus=bus) as s, client_of(s) as client:
        stream = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        await anext(stream)
        assert len(bus.subscriptions) == 1
        await stream.close()
        await until(lambda: not bus.subscriptions)


async def test_events_that_cannot_be_stored_are_left_out_and_the_response_is_not() -> None:
    class Refusing(FakeRecords):
        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            if ".events." in key:
                raise Unavailable("JetStream is away")
            return await super().put(key, value, **more)

    async with storing(Speaker(), records=Refusing()) as s, client_of(s) as client:
        stream = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        events: Any = [event async for event in stream]
    assert [event.type for event in events] == ["response.completed"]
    assert events[0].response.output_text == "Hello you"


async def test_a_chunk_whose_confirmation_was_lost_is_written_again_as_it_was() -> None:
    """A reader may have seen it, and counts its events to find the next one."""

    class Losing(FakeRecords):
        chunks: list[bytes]
        is_lossy = True

        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            revision = await super().put(key, value, **more)
            if ".events." in key:
                self.chunks.append(value)
                if self.is_lossy:
                    raise Unavailable("no confirmation")
            return revision

    records = Losing()
    records.chunks = []
    response = ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={})
    log = EventLog(stored_responses(records), "", response)
    log.add([b"1\n\n2\n\n"])
    async with log.writing():
        await until(lambda: len(records.chunks) == 1)
        log.add([b"3\n\n"])
        await until(lambda: len(records.chunks) == 2)
        records.is_lossy = False
    first = event("response.created", 0, response=response) + b"1\n\n2\n\n"
    assert records.chunks[-3:] == [first, first, b"3\n\n"]
    assert [int(key.rpartition(".")[2]) for key in records.records] == [0, 3]


async def test_deleting_a_response_deletes_its_events() -> None:
    async with storing(Speaker()) as s, client_of(s) as client:
        stream = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
        final: Any = [event async for event in stream][-1]
        assert any(".events." in key for key in s.records.records)
        await client.responses.delete(final.response.id)
        assert s.records.records == {}
        gone = await s.edge.http.get(f"{PATH}/{final.response.id}", params={"stream": "true"})
        assert gone.status_code == 404


async def test_events_that_are_written_after_their_response_was_deleted_do_not_stay() -> None:
    """The frontend that generates learns of the deletion when it writes the response again."""

    class Counting(FakeRecords):
        chunks = 0

        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            self.chunks += ".events." in key
            return await super().put(key, value, **more)

    held: list[FakeStream] = []
    async with storing(held.append, records=(records := Counting())) as s, client_of(s) as client:
        reading = asyncio.create_task(_types_of_new(client))
        await until(lambda: bool(held))
        (id,) = {key.split(".")[1] for key in records.records}
        await client.responses.delete(id)
        before = records.chunks
        Speaker()(held[0])
        await until(lambda: records.chunks > before and not records.records)
        with pytest.raises(APIError, match="is not found"):
            await reading


async def test_the_number_of_an_event_is_checked() -> None:
    async with storing(Speaker()) as s:
        id = (await s.create())["id"]
        for wrong in ("-1", "x", "1" * 10):
            refused = await s.edge.http.get(f"{PATH}/{id}", params={"stream": "true", "starting_after": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


async def _settled() -> None:
    """Let all that can go on without a timer do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _types(client: AsyncOpenAI, id: str) -> list[str]:
    return [event.type async for event in await client.responses.retrieve(id, stream=True)]


async def _types_of_new(client: AsyncOpenAI) -> list[str]:
    created = await client.responses.create(model="talker", input="Hi", background=True, stream=True)
    return [event.type async for event in created]
