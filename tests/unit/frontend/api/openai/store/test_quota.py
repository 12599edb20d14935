"""How much a key may store, in files, responses and conversations together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Struct

from dynamo.common.errors import PayloadTooLarge, Unavailable
from dynamo.common.messaging.jetstream.records import Record
from dynamo.common.process.work import Hold
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.store.event_log import EventLog
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.quota import COUNTED_S, StoredBytes
from dynamo.frontend.api.openai.store.stored import new_response_id
from tests.support.fake_records import FakeRecords
from tests.support.storing import storage_of, stored_responses


class _Response(Struct):
    """A response without output."""

    id: str
    background: bool = False
    output: tuple[()] = ()


class Frontend:
    """One process, as far as what is stored goes; others may have the same records."""

    def __init__(self, files: FakeRecords, responses: FakeRecords, now: list[float], limit: int = 2000) -> None:
        self.quota = StoredBytes({"team": limit}.get, lambda: now[0])
        self.files = Files(storage_of(files, quota=self.quota))
        self.responses = stored_responses(responses, quota=self.quota)
        self.conversations = self.responses.conversations
        self.batches = Batches(storage_of(files, quota=self.quota))

    async def stream(self, owner: str, id: str, size: int) -> None:
        """Store events of a response that have about so many bytes."""
        response = ResponseObject(id=id, created_at=1, model="m", reasoning={}, text={})
        log = EventLog(self.responses, owner, response)
        async with log.writing():
            log.add([b"x" * size + b"\n\n"])

    async def respond(self, owner: str, size: int) -> str:
        """Store a response of about so many bytes; return its id."""
        id = new_response_id()
        made: Any = _Response(id)
        await self.responses.save(owner, made, items_of(size), last=0)
        return id

    async def create(self, kind: str, size: int) -> str:
        """Store what has about so many bytes for the key with a limit; return its id."""
        if kind == "files":
            return (await self.files.create("team", "f", "batch", b"x" * size)).id
        if kind == "conversations":
            return (await self.conversations.create("team", items_of(size), {})).id
        return await self.respond("team", size)


def items_of(size: int) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": "x" * size}]


def frontends() -> tuple[Frontend, Frontend, list[float]]:
    files, responses, now = FakeRecords(), FakeRecords(), [0.0]
    return Frontend(files, responses, now), Frontend(files, responses, now), now


async def test_files_responses_and_conversations_count_together_at_all_frontends() -> None:
    first, second, now = frontends()
    await first.files.create("team", "f", "batch", b"x" * 900)
    await first.respond("team", 500)
    conversation = await first.conversations.create("team", [{"type": "message", "content": "x" * 100}], {})
    for frontend in (first, second):
        with pytest.raises(PayloadTooLarge, match=r"has stored 1[5-9].. of its 2000 bytes .* takes 600; delete some"):
            await frontend.files.create("team", "f", "batch", b"x" * 600)
        with pytest.raises(PayloadTooLarge):
            await frontend.conversations.create("team", [{"type": "message", "content": "x" * 600}], {})
        with pytest.raises(PayloadTooLarge):
            await frontend.conversations.add("team", conversation.id, [{"type": "message", "content": "x" * 600}])
        with pytest.raises(PayloadTooLarge):
            await frontend.conversations.update("team", conversation.id, {"about": "x" * 512})
        await frontend.conversations.add("team", conversation.id, [{"type": "message", "content": "x"}])
    await first.files.create("other", "f", "batch", b"x" * 5000)
    await first.conversations.delete("team", conversation.id)
    now[0] += COUNTED_S
    await second.files.create("team", "f", "batch", b"x" * 400)


async def test_a_key_that_has_stored_all_it_may_is_served_and_not_stored_unless_it_insists() -> None:
    frontend, other, now = frontends()
    assert await frontend.responses.may_store("team", None)
    id = await frontend.respond("team", 1000)
    await frontend.stream("team", id, 1000)
    assert not await frontend.responses.may_store("team", None)
    assert not await other.responses.may_store("team", None)
    assert await frontend.responses.may_store("other", None)
    with pytest.raises(PayloadTooLarge):
        await frontend.responses.may_store("team", True)
    assert not await frontend.responses.may_store("team", False)
    await frontend.responses.delete("team", id)
    now[0] += COUNTED_S
    assert await frontend.responses.may_store("team", True)


@pytest.mark.parametrize("kind", ["files", "conversations", "responses"])
async def test_what_is_deleted_makes_room_at_once_where_it_is_deleted(kind: str) -> None:
    frontend, _, _ = frontends()
    id = await frontend.create(kind, 1500)
    if kind == "responses":
        await frontend.stream("team", id, 1500)
    with pytest.raises(PayloadTooLarge):
        await frontend.files.create("team", "f", "batch", b"x" * 600)
    await {"files": frontend.files, "conversations": frontend.conversations, "responses": frontend.responses}[kind].delete(
        "team", id
    )
    await frontend.files.create("team", "f", "batch", b"x" * 2000)


async def test_events_of_streams_count_at_all_frontends_also_above_the_limit() -> None:
    first, second, _ = frontends()
    id = await first.respond("team", 100)
    await first.stream("team", id, 3000)
    for frontend in (first, second):
        with pytest.raises(PayloadTooLarge, match=r"has stored 3... of its 2000 bytes"):
            await frontend.files.create("team", "f", "batch", b"x")


async def test_batches_count() -> None:
    frontend, _, now = frontends()
    batch = await frontend.batches.create("team", "/v1/responses", "file-1", {"about": "x" * 500})
    with pytest.raises(PayloadTooLarge, match=r"has stored 1... of its 2000 bytes"):
        await frontend.files.create("team", "f", "batch", b"x" * 1500)
    now[0] += COUNTED_S
    with pytest.raises(PayloadTooLarge):
        await frontend.batches.create("team", "/v1/responses", "file-1", {"about": "x" * 1300})
    assert [each.id for each in await frontend.batches.owned_by("team")] == [batch.id]


class SlowRecords(FakeRecords):
    """Lets others run after a record is read, and before each other operation."""

    async def get(self, key: str, hold: Hold | None = None) -> Record | None:
        record = await super().get(key, hold)
        await asyncio.sleep(0)
        return record

    async def put(self, key: str, value: bytes, **more: Any) -> int | None:
        await asyncio.sleep(0)
        return await super().put(key, value, **more)

    async def values(self, pattern: str) -> dict[str, bytes]:
        await asyncio.sleep(0)
        return await super().values(pattern)


@pytest.mark.parametrize("kind", ["files", "conversations", "items", "responses"])
async def test_what_is_created_at_the_same_time_counts_together(kind: str) -> None:
    records = SlowRecords()
    frontend = Frontend(SlowRecords(), records, [0.0])
    made = [await frontend.conversations.create("team", [], {}) for _ in range(2)]

    async def create(number: int) -> None:
        if kind == "items":
            await frontend.conversations.add("team", made[number % 2].id, items_of(600))
        else:
            await frontend.create(kind, 600)

    results = await asyncio.gather(*map(create, range(5)), return_exceptions=True)
    assert [type(result) for result in results].count(PayloadTooLarge) == 3
    assert sum(file.bytes for file in await frontend.files.owned_by("team")) == (1200 if kind == "files" else 0)
    assert sum(int(record.value) for key, record in records.records.items() if ".size." in key) <= 2000
    assert sum(len(record.value) for key, record in records.records.items() if ".size." not in key) <= 2000


@pytest.mark.parametrize("kind", ["files", "conversations", "responses"])
async def test_what_is_deleted_by_several_at_the_same_time_makes_room_once(kind: str) -> None:
    frontend = Frontend(SlowRecords(), SlowRecords(), [0.0])
    id = await frontend.create(kind, 600)
    await frontend.files.create("team", "f", "batch", b"x" * 600)
    stored: Any = getattr(frontend, kind)
    results = await asyncio.gather(*(stored.delete("team", id) for _ in range(5)), return_exceptions=True)
    assert None in results
    with pytest.raises(PayloadTooLarge, match="has stored 600 of its 2000"):
        await frontend.files.create("team", "f", "batch", b"x" * 1900)


async def test_an_upload_that_fails_takes_no_room() -> None:
    files = FakeRecords()
    frontend = Frontend(files, FakeRecords(), [0.0])
    await frontend.files.create("team", "f", "batch", b"x")
    files.is_away = True
    with pytest.raises(Unavailable):
        await frontend.files.put("team", "file-" + "0" * 32, "out", "batch_output", b"x" * 1900)
    files.is_away = False
    await frontend.files.create("team", "f", "batch", b"x" * 1900)


class FailingRecords(FakeRecords):
    """Fails at the second write with `error`, and then, if it is away, at all."""

    def __init__(self, error: BaseException, *, is_away: bool = False) -> None:
        super().__init__()
        self._error: BaseException | None = error
        self._is_away_then = is_away

    async def put(self, key: str, value: bytes, **more: Any) -> int | None:
        if self.records and self._error is not None:
            error, self._error = self._error, None
            self.is_away = self._is_away_then
            raise error
        return await super().put(key, value, **more)


@pytest.mark.parametrize("error", [Unavailable("full"), asyncio.CancelledError(), RuntimeError()])
async def test_an_upload_that_fails_between_its_two_writes_leaves_nothing(error: BaseException) -> None:
    files = FailingRecords(error)
    frontend = Frontend(files, FakeRecords(), [0.0])
    with pytest.raises(type(error)):
        await frontend.files.create("team", "f", "batch", b"x" * 1900)
    assert not files.records
    await frontend.files.create("team", "f", "batch", b"x" * 1900)


async def test_what_an_upload_left_counts_until_it_can_be_deleted() -> None:
    files, now = FailingRecords(Unavailable("full"), is_away=True), [0.0]
    frontend = Frontend(files, FakeRecords(), now)
    with pytest.raises(Unavailable):
        await frontend.files.create("team", "f", "batch", b"x" * 1900)
    files.is_away = False
    assert len(files.records) == 1
    with pytest.raises(PayloadTooLarge, match="has stored 1900 of its 2000"):
        await frontend.files.create("team", "f", "batch", b"x" * 1900)
    now[0] += COUNTED_S
    await frontend.files.create("team", "f", "batch", b"x" * 1900)
    assert [file.bytes for file in await frontend.files.owned_by("team")] == [1900]
    assert len(files.records) == 2


async def test_a_file_that_cannot_be_described_is_not_written() -> None:
    files = FakeRecords()
    frontend = Frontend(files, FakeRecords(), [0.0])
    with pytest.raises(UnicodeEncodeError):
        await frontend.files.put("team", "file-" + "0" * 32, "\ud800", "batch_output", b"x")
    assert not files.written_bytes


async def test_output_of_a_batch_is_kept_even_above_the_limit_and_counts() -> None:
    frontend, _, _ = frontends()
    await frontend.files.create("team", "f", "batch", b"x" * 1500)
    await frontend.files.put("team", "file-" + "0" * 32, "out", "batch_output", b"x" * 1500)
    with pytest.raises(PayloadTooLarge, match="has stored 3000 of its 2000"):
        await frontend.files.create("team", "f", "batch", b"x")


async def test_nothing_is_counted_or_written_for_keys_without_a_limit() -> None:
    files, responses = FakeRecords(), FakeRecords()
    frontend = Frontend(files, responses, [0.0])
    await frontend.respond("other", 10)
    assert not any(".size." in key for key in responses.records)
    responses.is_away = True
    await frontend.files.create("other", "f", "batch", b"x")
    with pytest.raises(Unavailable):
        await frontend.files.create("team", "f", "batch", b"x")
