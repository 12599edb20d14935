"""Responses with state: stored, continued, read, deleted, and generated in the background."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
import pytest
from openai import AsyncOpenAI, NotFoundError

from dynamo.common.errors import InvalidRequest, Overloaded, RateLimited, Unavailable
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import TEXT
from dynamo.frontend.api.openai.store import background as background_module
from dynamo.frontend.api.openai.store.background import BackgroundResponses, Stages
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.quota import StoredBytes
from dynamo.frontend.api.openai.store.stored import LOST_S, new_response_id
from dynamo.frontend.config import CapacityOptions
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from tests.support.fake_records import FakeRecords
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker
from tests.support.storing import stored_responses, storing
from tests.support.waiting import until, until_free

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "talker", "input": "Hi"}


async def test_a_conversation_goes_on_by_the_id_of_its_last_response() -> None:
    speaker = Speaker()
    async with storing(speaker) as s:
        first = await s.create(input="Hi", instructions="Be kind.")
        second = await s.create(input="And now?", previous_response_id=first["id"])
        assert speaker.prompt == "<user>Hi\n<assistant>Hello you\n<user>And now?\n<assistant>"  # instructions do not go on
        third = await s.create(input="Well?", previous_response_id=second["id"], stream=False)
        assert speaker.prompt.count("Hello you") == 2
        assert (first["store"], second["previous_response_id"], third["previous_response_id"]) == (
            True,
            first["id"],
            second["id"],
        )
        assert await s.read(first["id"]) == first


async def test_a_streamed_response_is_stored_before_it_ends() -> None:
    async with storing(Speaker()) as s:
        streamed = await s.edge.post(PATH, HELLO | {"stream": True})
        assert "response.completed" in streamed.text
        (id,) = {key.removeprefix("ns.").removesuffix(".items") for key in s.records.records}
        assert (await s.read(id))["output"][0]["content"][0]["text"] == "Hello you"


async def test_openais_client_reads_lists_and_deletes_what_it_stored() -> None:
    async with storing(Speaker()) as s, AsyncOpenAI(base_url=f"{s.edge.url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(model="talker", input="Hi", store=True)
        again = await client.responses.retrieve(response.id)
        assert again.output_text == response.output_text == "Hello you"
        following = await client.responses.create(model="talker", input="More", previous_response_id=response.id)
        items = await client.responses.input_items.list(following.id, order="asc", limit=2)
        assert [item.type for item in items.data] == ["message", "message"] and items.has_more
        rest = [
            item
            async for item in await client.responses.input_items.list(following.id, order="asc", after=items.data[1].id or "")
        ]
        assert [item.content[0].text for item in rest if item.type == "message"] == ["More"]  # type: ignore[union-attr]
        await client.responses.delete(response.id)
        with pytest.raises(NotFoundError, match="is not found"):
            await client.responses.retrieve(response.id)
        assert (await client.responses.retrieve(following.id)).id == following.id


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True, "store": False}, "store", "when `store` is true"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation", "exclude each other"),
    ],
)
async def test_what_cannot_be_combined_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    async with storing(Speaker()) as s:
        error = await s.edge.error(PATH, HELLO | fields)
    assert error["param"] == param and words in error["message"]


async def test_an_unknown_response_is_not_found() -> None:
    async with storing(Speaker()) as s:
        for id in (new_response_id(), "resp_1", ".."):
            assert (await s.edge.http.get(f"{PATH}/{id}")).status_code == 404
            assert (await s.edge.post(PATH, HELLO | {"previous_response_id": id})).status_code == 404
        error = (await s.edge.http.get(f"{PATH}/resp_1")).json()["error"]
    assert (error["param"], error["code"]) == (None, None)


async def test_without_jetstream_only_those_fail_that_need_it() -> None:
    async with storing(Speaker()) as s:
        stored = await s.create()
        s.records.is_away = True
        assert (await s.create())["store"] is False
        for request in (HELLO | {"store": True}, HELLO | {"background": True}, HELLO | {"previous_response_id": stored["id"]}):
            response = await s.edge.post(PATH, request)
            assert (response.status_code, "JetStream" in response.text) == (503, True), response.text
        assert (await s.edge.http.get(f"{PATH}/{stored['id']}")).status_code == 503


async def test_a_response_that_turns_out_not_to_be_stored_says_so() -> None:
    records, speaker = FakeRecords(), Speaker()

    def respond(stream: FakeStream) -> None:
        records.is_away = True
        speaker(stream)

    async with storing(respond, records=records) as s:
        assert (await s.create())["store"] is False
        records.is_away = False
        streamed = await s.edge.post(PATH, HELLO | {"stream": True})
        assert '"store":false' in streamed.text.split("event: response.completed")[1]


async def test_nothing_is_stored_that_is_not_to_be() -> None:
    async with storing(Speaker(), by_default=False) as s:
        await s.create()
        await s.create(store=False)
        assert s.records.records == {}
        await s.create(store=True)
        assert len(s.records.records) == 2


async def test_reading_a_conversation_counts_as_a_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(account: object) -> NoReturn:
        raise RateLimited("too many at once")

    async with storing(Speaker()) as s:
        first = await s.create()
        monkeypatch.setattr(type(ANONYMOUS), "occupy", refuse)
        await s.create()
        refused = await s.edge.post(PATH, HELLO | {"previous_response_id": first["id"]})
        cancelled = await s.edge.post(f"{PATH}/{first['id']}/cancel", {})
    assert (refused.status_code, refused.json()["error"]["message"]) == (429, "too many at once")
    assert "Cannot cancel a synchronous response" in cancelled.text  # cancelling needs no place


async def test_a_conversation_that_does_not_fit_into_memory_is_not_parsed() -> None:
    options = CapacityOptions(max_buffered_bytes=TEXT.copies * 3_500)
    async with storing(Speaker(), capacity=options) as s:
        first = await s.create(input="x" * 3_000)
        refused = await s.edge.post(PATH, HELLO | {"input": "y" * 3_000, "previous_response_id": first["id"]})
        await s.create(input="y" * 3_000)
    assert refused.status_code == 503


async def test_what_is_stored_counts_as_held_before_it_is_read() -> None:
    async with storing(Speaker(), capacity=CapacityOptions(max_buffered_bytes=20_000)) as s:
        made = await s.create(input="x" * 2_000)
        conversation = (await s.edge.post("/v1/conversations", {"items": [{"role": "user", "content": "x" * 2_000}]})).json()
        paths = [f"{PATH}/{made['id']}", f"{PATH}/{made['id']}/input_items", f"/v1/conversations/{conversation['id']}"]
        with s.edge.capacity.holding() as others:
            others.hold(19_000)
            for path in (*paths, f"/v1/conversations/{conversation['id']}/items"):
                assert (await s.edge.http.get(path)).status_code == 503
                await until(lambda: s.edge.capacity.buffered_bytes == 19_000)
        assert [(await s.edge.http.get(path)).status_code for path in paths] == [200] * 3
        await until_free(s.edge.capacity)


# In the background


async def test_a_response_in_the_background_is_read_when_it_is_done() -> None:
    held: list[FakeStream] = []
    async with storing(held.append) as s:
        begun = await s.create(background=True)
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        await s.reached(begun["id"], "in_progress")
        unfinished = await s.edge.error(PATH, HELLO | {"previous_response_id": begun["id"]})
        assert "only one that ended" in unfinished["message"]
        Speaker()(held[0])
        response = await s.reached(begun["id"], "completed")
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("completed", "Hello you")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusing", "check"), [(type(ANONYMOUS), "admit"), (DispatchedStream, "check_line")])
async def test_a_response_in_the_background_that_a_limit_or_a_full_line_refuses_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, stream: bool, refusing: type, check: str
) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise RateLimited("too many a second", retry_after_s=3)

    async with storing(Speaker()) as s:
        monkeypatch.setattr(refusing, check, refuse)
        refused = await s.edge.post(PATH, HELLO | {"background": True, "stream": stream})
        assert s.records.records == {}
        metrics = s.edge.registry.collect()
        counted = [x.value for metric in metrics for x in metric.samples if x.name == "dynamo_frontend_requests_total"]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    assert refused.json()["error"]["message"] == "too many a second"
    assert sum(counted) == 1


async def test_a_response_in_the_background_that_cannot_be_stored_is_not_generated() -> None:
    class Full(FakeRecords):
        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            raise Unavailable("the bucket is full")

    held: list[FakeStream] = []
    async with storing(held.append, records=Full()) as s:
        refused = await s.edge.post(PATH, HELLO | {"background": True})
    assert (refused.status_code, held) == (503, [])


async def test_cancelling_reaches_the_frontend_that_generates() -> None:
    held: list[FakeStream] = []

    def respond(stream: FakeStream) -> None:
        if held:
            Speaker()(stream)
        held.append(stream)

    async with storing(respond, beat_s=0.01) as s:
        begun = await s.create(background=True)
        await until(lambda: bool(held))
        cancelled = (await s.edge.post(f"{PATH}/{begun['id']}/cancel", {})).json()
        assert cancelled["status"] == "cancelled"
        await until(lambda: held[0].cancelled)
        assert (await s.edge.post(f"{PATH}/{begun['id']}/cancel", {})).json() == cancelled
        assert (await s.read(begun["id"]))["status"] == "cancelled"
        plain = await s.create()
        refused = await s.edge.error(f"{PATH}/{plain['id']}/cancel", {})
    assert "Cannot cancel a synchronous response" in refused["message"]


async def test_a_failure_is_stored_and_so_is_the_death_of_the_frontend() -> None:
    held: list[FakeStream] = []

    def respond(stream: FakeStream) -> None:
        if held:
            stream.fail(Overloaded("enough to do"))
        held.append(stream)

    async with storing(respond) as s:
        left = await s.create(background=True)
        await s.reached(left["id"], "in_progress")
        failed = await s.create(background=True)

        ended = await s.reached(failed["id"], "failed")
        assert ended["error"] == {"code": "rate_limit_exceeded", "message": "enough to do"}
        s.now[0] += LOST_S + 1
        assert (await s.read(left["id"]))["status"] == "in_progress", "the frontend that generates it knows that it goes on"
        gone = await stored_responses(s.records).read("", left["id"])
        assert (gone["status"], gone["error"]["message"]) == ("failed", "the frontend that generated the response has ended")


@pytest.mark.parametrize("ahead_s", [-3600, -60, 60, 3600])
async def test_clocks_that_differ_show_no_healthy_response_as_failed_and_no_dead_one_as_healthy(ahead_s: int) -> None:
    """There are three hosts: the store's, the one that writes, and one that reads and is so many seconds ahead of it."""
    now = [5000.0]
    records = FakeRecords(lambda: now[0])
    writer = stored_responses(records, clock=lambda: 4000.0)
    reader = stored_responses(records, clock=lambda: 4000.0 + ahead_s)
    response = ResponseObject(
        id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, background=True, status="in_progress"
    )
    revision = await writer.save("", response, [], last=0)
    now[0] += LOST_S - 1
    assert (await reader.read("", response.id))["status"] == "in_progress"
    revision = await writer.save("", response, None, last=revision)
    now[0] += LOST_S - 1
    assert (await reader.read("", response.id))["status"] == "in_progress"
    now[0] += 2
    assert (await reader.read("", response.id))["status"] == "failed"
    assert await writer.save("", response, None, last=revision) is None  # if it was only slow, that stays its end
    assert await writer.running_revision("", response.id) is None


async def test_a_response_that_no_frontend_could_renew_while_the_store_was_away_is_not_lost() -> None:
    now = [5000.0]
    records = FakeRecords(lambda: now[0])
    writer, reader = stored_responses(records), stored_responses(records)
    response = _running_response()
    revision = await writer.save("", response, [], last=0)
    records.is_away = True
    now[0] += 10 * LOST_S
    records.is_away = False
    assert (await reader.read("", response.id))["status"] == "in_progress"
    now[0] += LOST_S - 1
    assert (await reader.read("", response.id))["status"] == "in_progress"
    assert await writer.renew(response.id, revision or 0) is not None
    now[0] += LOST_S - 1
    assert (await reader.read("", response.id))["status"] == "in_progress"
    now[0] += 2
    assert (await reader.read("", response.id))["status"] == "failed"


async def test_a_response_is_not_shown_as_lost_while_that_cannot_be_written() -> None:
    """Then its frontend cannot write either."""

    class ReadOnly(FakeRecords):
        takes_writes = True

        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            if not self.takes_writes:
                raise Unavailable("the disk is full")
            return await super().put(key, value, **more)

    now = [5000.0]
    records = ReadOnly(lambda: now[0])
    stored = stored_responses(records)
    response = _running_response()
    await stored.save("", response, [], last=0)
    now[0] += LOST_S + 1
    records.takes_writes = False
    assert (await stored.read("", response.id))["status"] == "in_progress"
    records.takes_writes = True
    assert (await stored.read("", response.id))["status"] == "failed"


async def test_a_response_is_written_as_soon_as_the_store_is_back_however_long_it_was_away() -> None:
    class Refusing(FakeRecords):
        refused = 0

        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            self.refused += self.is_away
            return await super().put(key, value, **more)

    records = Refusing()
    stored = stored_responses(records)
    background = BackgroundResponses(stored, beat_s=3600.0)  # a pause would never end
    response = _running_response()

    async def generate(stages: Stages) -> ResponseObject:
        await stages.admitted()
        records.is_away = True
        return msgspec.structs.replace(response, status="completed")

    await background.start("", response, [], generate, Capacity().enter())
    for attempts in range(1, 20):
        await until(lambda: records.refused == attempts)  # noqa: B023
        records.is_away = False
        records.is_away = attempts < 19
    await background.drain(60)
    assert (await stored.read("", response.id))["status"] == "completed"


@pytest.mark.parametrize("is_back", ["at once", "later"])
async def test_of_a_response_that_cannot_be_stored_whole_nothing_stays(is_back: str) -> None:
    class HalfFull(FakeRecords):
        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            if key.endswith(response.id):
                self.is_away = is_back == "later"
                raise Unavailable("the bucket is full")
            return await super().put(key, value, **more)

    response = msgspec.structs.replace(_running_response(), background=False, status="completed")
    records = HalfFull()
    stored = stored_responses(records, quota=StoredBytes(lambda owner: 10_000))
    with pytest.raises(Unavailable):
        await stored.save("a", response, [{"type": "message", "id": "msg_1"}], last=0)
    assert records.records
    await asyncio.sleep(0)  # the first attempt to delete it
    records.is_away = False
    await until(lambda: not records.records)
    await stored.close()


def _running_response() -> ResponseObject:
    return ResponseObject(
        id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, background=True, status="in_progress"
    )


async def test_a_write_whose_confirmation_was_lost_does_not_end_the_response() -> None:
    """Its revision is then another one than the writer knows."""
    records = FakeRecords()
    stored = stored_responses(records)
    background = BackgroundResponses(stored, beat_s=0.01)
    response = ResponseObject(
        id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, background=True, status="in_progress"
    )
    release = asyncio.Event()

    async def generate(stages: Stages) -> ResponseObject:
        await stages.admitted()
        await release.wait()
        return ResponseObject(id=response.id, created_at=1, model="m", reasoning={}, text={}, status="completed")

    await background.start("a", response, [], generate, Capacity().enter())
    await stored.save("a", response, None)  # as a write of which only the confirmation was lost
    release.set()
    await background.drain(5)
    assert (await stored.read("a", response.id))["status"] == "completed"


async def test_a_long_response_is_written_whole_when_it_changes_and_not_each_time_that_it_is_said_to_go_on() -> None:
    records = FakeRecords()
    stored = stored_responses(records)
    background = BackgroundResponses(stored, beat_s=0.001)
    response = ResponseObject(
        id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, background=True, status="queued", user="x" * 20_000
    )
    release = asyncio.Event()

    async def generate(stages: Stages) -> ResponseObject:
        await stages.admitted()
        stages.sent()
        await release.wait()
        return msgspec.structs.replace(response, status="completed")

    await background.start("", response, [], generate, Capacity().enter())
    await until(lambda: records.renewed >= 50)
    assert (await stored.read("", response.id))["status"] == "in_progress"
    release.set()
    await background.drain(5)
    assert (await stored.read("", response.id))["status"] == "completed"
    assert 3 * 20_000 < records.written_bytes - 100 * records.renewed < 3 * 21_000


class SlowRecords(FakeRecords):
    """Writes only once it is `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def put(self, key: str, value: bytes, **more: Any) -> int | None:
        await self.open.wait()
        return await super().put(key, value, **more)


async def test_responses_that_begin_at_once_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "MAX_RUNNING", 2)
    records, capacity = SlowRecords(), Capacity()
    background = BackgroundResponses(stored_responses(records))
    responses = [
        ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, status="queued") for _ in range(3)
    ]

    async def generate(stages: Stages) -> ResponseObject:
        await stages.admitted()
        return responses[0]

    starts = [asyncio.create_task(background.start("", each, [], generate, capacity.enter())) for each in responses]
    await until(starts[2].done)
    assert capacity.requests == 2
    records.open.set()
    results = await asyncio.gather(*starts, return_exceptions=True)
    await background.drain(5)
    assert [isinstance(result, Overloaded) for result in results] == [False, False, True]
    await until_free(capacity)


async def test_a_key_leaves_half_of_what_may_run_in_the_background_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "MAX_RUNNING", 8)
    capacity, release = Capacity(), asyncio.Event()
    background = BackgroundResponses(stored_responses(FakeRecords()))

    async def begin(owner: str) -> None:
        response = ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, status="queued")

        async def generate(stages: Stages) -> ResponseObject:
            await stages.admitted()
            await release.wait()
            return response

        await background.start(owner, response, [], generate, capacity.enter())

    for _ in range(4):
        await begin("greedy")
    with pytest.raises(RateLimited, match="4 responses of the API key 'greedy'"):
        await begin("greedy")
    for _ in range(2):
        await begin("other")
    with pytest.raises(RateLimited):
        await begin("other")
    assert capacity.requests == 6
    release.set()
    await background.drain(5)
    await begin("greedy")
    await background.drain(5)
    assert capacity.requests == 0


async def test_what_goes_on_in_the_background_counts_against_the_capacity_until_it_has_ended() -> None:
    held: list[FakeStream] = []
    async with storing(held.append, capacity=CapacityOptions(max_concurrent_requests=2)) as s:
        begun = await s.create(background=True)
        await until(lambda: s.edge.capacity.requests == 1)
        assert s.edge.capacity.buffered_bytes >= len(str(HELLO))
        assert (await s.edge.post(PATH, HELLO | {"background": True})).status_code == 503, "itself, and what goes on"
        Speaker()(held[0])
        await until_free(s.edge.capacity)
        await s.reached(begun["id"], "completed")


async def test_a_response_that_runs_cannot_be_continued() -> None:
    stored = stored_responses(FakeRecords())
    response = ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={}, status="in_progress")
    await stored.save("", response, [])
    with pytest.raises(InvalidRequest, match="in_progress"):
        await stored.history("", response.id)
