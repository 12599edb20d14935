"""What is true of every record that belongs to an API key: a file, a batch, a response or a conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from dynamo.common.errors import DynamoError, InvalidRequest, Overloaded
from dynamo.common.messaging.jetstream.key_values import DamagedRecord
from dynamo.common.messaging.jetstream.records import Record
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.owned import RecordNotFound
from dynamo.frontend.api.openai.store.stored import new_response_id
from tests.support.fake_records import FakeRecords
from tests.support.storing import storage_of, stored_responses

HELLO = ({"id": "msg_1", "type": "message", "role": "user", "content": "Hi"},)


class Kept:
    """What one frontend keeps for keys, all in the same records."""

    def __init__(self, records: FakeRecords) -> None:
        storage = storage_of(records, lambda: 1000.0)
        self.records = records
        self.files, self.batches = Files(storage), Batches(storage)
        self.responses = stored_responses(records, clock=lambda: 1000.0)
        self.conversations = self.responses.conversations


async def make_file(kept: Kept, owner: str) -> str:
    return (await kept.files.create(owner, "f", "batch", b"x")).id


async def make_batch(kept: Kept, owner: str) -> str:
    return (await kept.batches.create(owner, "/v1/completions", "file-1", None)).id


async def make_response(kept: Kept, owner: str) -> str:
    id = new_response_id()
    response = ResponseObject(id=id, created_at=1, model="m", reasoning={}, text={}, status="queued", background=True)
    await kept.responses.save(owner, response, HELLO)
    return id


async def make_conversation(kept: Kept, owner: str) -> str:
    return (await kept.conversations.create(owner, HELLO, {"a": "b"})).id


MAKE: Mapping[str, Callable[[Kept, str], Awaitable[str]]] = {
    "file": make_file,
    "batch": make_batch,
    "response": make_response,
    "conversation": make_conversation,
}

Operation: TypeAlias = Callable[[Kept, str, str], Awaitable[object]]
"""Called with the owner and the id of a record."""

READ: Mapping[str, Operation] = {
    "file": lambda kept, owner, id: kept.files.read(owner, id),
    "batch": lambda kept, owner, id: kept.batches.read(owner, id),
    "response": lambda kept, owner, id: kept.responses.read(owner, id),
    "conversation": lambda kept, owner, id: kept.conversations.read(owner, id),
}
CHANGE: Mapping[str, Operation] = {
    "batch": lambda kept, owner, id: kept.batches.change(owner, id, lambda batch: replace(batch, status="cancelling")),
    "response": lambda kept, owner, id: kept.responses.cancel(owner, id),
    "conversation": lambda kept, owner, id: kept.conversations.update(owner, id, {"c": "d"}),
}
OTHERS: Mapping[str, Sequence[Operation]] = {
    "file": (
        lambda kept, owner, id: kept.files.open(owner, id),
        lambda kept, owner, id: kept.files.content(owner, id, hold_nothing),
        lambda kept, owner, id: kept.files.delete(owner, id),
    ),
    "batch": (
        lambda kept, owner, id: kept.batches.take_over(owner, id, "me"),
        lambda kept, owner, id: kept.batches.stop(owner, id, "me"),
    ),
    "response": (
        lambda kept, owner, id: kept.responses.items(owner, id),
        lambda kept, owner, id: kept.responses.history(owner, id),
        lambda kept, owner, id: kept.responses.delete(owner, id),
    ),
    "conversation": (
        lambda kept, owner, id: kept.conversations.items(owner, id),
        lambda kept, owner, id: kept.conversations.add(owner, id, HELLO),
        lambda kept, owner, id: kept.conversations.delete_item(owner, id, "msg_1"),
        lambda kept, owner, id: kept.conversations.delete(owner, id),
    ),
}


def operations(kind: str) -> list[Operation]:
    return [READ[kind], *([CHANGE[kind]] if kind in CHANGE else []), *OTHERS[kind]]


@pytest.mark.parametrize("kind", MAKE)
async def test_a_record_is_there_only_for_the_key_that_made_it(kind: str) -> None:
    kept = Kept(FakeRecords())
    id = await MAKE[kind](kept, "a")
    before = dict(kept.records.records)
    for operation in operations(kind):
        with pytest.raises(RecordNotFound, match=f"^{kind} '{id}' is not found$"):
            await operation(kept, "b", id)
    assert kept.records.records == before
    await READ[kind](kept, "a", id)


@pytest.mark.parametrize("kind", MAKE)
async def test_what_is_no_id_of_the_kind_is_not_found_and_not_looked_for(kind: str) -> None:
    kept = Kept(FakeRecords())
    own = await MAKE[kind](kept, "a")
    others = [await make(kept, "a") for other, make in MAKE.items() if other != kind]
    for id in ("", "..", "*", own[:-1], own[:-1] + ">", own + "0", own.upper(), own + "\n", own + ".items", *others):
        for operation in operations(kind):
            with pytest.raises(RecordNotFound):
                await operation(kept, "a", id)
    assert kept.records.reads == 0
    with pytest.raises(RecordNotFound, match=f"^{kind} '{'x' * 80}' is not found$"):
        await READ[kind](kept, "a", "x" * 100)


@pytest.mark.parametrize("kind", MAKE)
async def test_a_record_that_is_damaged_is_not_taken_for_one_that_is_not_there(kind: str) -> None:
    kept = Kept(FakeRecords())
    id = await MAKE[kind](kept, "a")
    kept.records.damaged = set(kept.records.records)
    with pytest.raises(DamagedRecord):
        await READ[kind](kept, "a", id)


class Changing(FakeRecords):
    """Records that another frontend writes again between each read and the write that follows it."""

    changes = 0
    """How many times more."""

    async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
        record = await super().get(key, hold)
        if record is not None and self.changes:
            self.changes -= 1
            await super().put(key, record.value)
        return record


@pytest.mark.parametrize("kind", CHANGE)
async def test_a_change_is_made_to_a_record_as_it_is_then(kind: str) -> None:
    records = Changing()
    kept = Kept(records)
    id = await MAKE[kind](kept, "a")
    records.changes = 3
    changed = await CHANGE[kind](kept, "a", id)
    assert records.changes == 0 and await READ[kind](kept, "a", id) == changed


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("batch", InvalidRequest, "changes too fast; try again"),
        ("response", InvalidRequest, "changes too fast to be cancelled; try again"),
        ("conversation", Overloaded, "changes too fast; try again"),
    ],
)
async def test_a_record_that_changes_all_the_time_is_left_as_it_is(kind: str, error: type[DynamoError], words: str) -> None:
    records = Changing()
    kept = Kept(records)
    id = await MAKE[kind](kept, "a")
    before = await READ[kind](kept, "a", id)
    records.changes = 1000
    with pytest.raises(error, match=f"^{kind} '{id}' {words}$"):
        await CHANGE[kind](kept, "a", id)
    assert await READ[kind](kept, "a", id) == before


EARLIER: Mapping[str, Mapping[str, str]] = {
    "file": {
        "ns.content.ca978112ca1bbdcafac231b39a23dc4d.ID": "x",
        "ns.file.ca978112ca1bbdcafac231b39a23dc4d.ID": '{"id":"ID","object":"file","bytes":1,"created_at":1000,"filename":"f",'
        '"purpose":"batch","status":"processed"}',
    },
    "batch": {
        "ns.waiting.ca978112ca1bbdcafac231b39a23dc4d.ID": '{"owner":"a","id":"ID","since":1000}',
        "ns.batch.ca978112ca1bbdcafac231b39a23dc4d.ID": '{"owner":"a","batch":{"id":"ID","object":"batch",'
        '"endpoint":"/v1/completions","errors":null,"input_file_id":"file-1","completion_window":"24h","status":"validating",'
        '"output_file_id":null,"error_file_id":null,"created_at":1000,"in_progress_at":null,"expires_at":87400,'
        '"finalizing_at":null,"completed_at":null,"failed_at":null,"expired_at":null,"cancelling_at":null,"cancelled_at":null,'
        '"request_counts":{"total":0,"completed":0,"failed":0},"metadata":null}}',
    },
    "response": {
        "ns.ID.items": '[{"id":"msg_1","type":"message","role":"user","content":"Hi"}]',
        "ns.ID": '{"owner":"a","response":{"id":"ID","object":"response","created_at":1,"status":"queued","completed_at":null,'
        '"background":true,"error":null,"incomplete_details":null,"instructions":null,"max_output_tokens":null,'
        '"max_tool_calls":null,"model":"m","output":[],"parallel_tool_calls":true,"previous_response_id":null,'
        '"conversation":null,"reasoning":{},"service_tier":"default","store":false,"temperature":null,"text":{},'
        '"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":null,"truncation":"disabled","usage":null,"user":null,'
        '"metadata":{}},"written_at":1000.0}',
    },
    "conversation": {
        "ns.ID": '{"owner":"a","shown":{"id":"ID","object":"conversation","created_at":1000,"metadata":{"a":"b"}},'
        '"items":[{"id":"msg_1","type":"message","role":"user","content":"Hi"}]}',
    },
}
"""The records of what `MAKE` makes for the key `a`, by their names in the store, as frontends wrote them on 2026-11-23."""


@pytest.mark.parametrize("kind", MAKE)
async def test_records_are_read_as_earlier_versions_wrote_them_and_written_so_that_those_read_them(kind: str) -> None:
    kept, others = Kept(FakeRecords()), FakeRecords()
    id = await MAKE[kind](kept, "a")
    earlier = {name.replace("ID", id): value.replace("ID", id).encode() for name, value in EARLIER[kind].items()}
    assert kept.records.records.keys() == earlier.keys()
    for name, value in earlier.items():
        written = kept.records.records[name].value
        assert written == value or written.startswith(value[:-1] + b","), "earlier versions overlook further fields at the end"
        await others.put(name, value)
    assert await READ[kind](Kept(others), "a", id) == await READ[kind](kept, "a", id)
