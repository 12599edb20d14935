"""Conversations: made, continued by responses, listed, changed, and items that requests only refer to."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI, NotFoundError

from dynamo.common.errors import InvalidRequest, NotFound, PayloadTooLarge
from dynamo.common.messaging.jetstream.records import WriteUnconfirmed
from dynamo.common.model_card import LlmInfo
from dynamo.frontend.api.openai.store import items as items_module
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.items import ItemIds, encode_items, parse_items
from dynamo.frontend.api.openai.store.quota import StoredBytes
from dynamo.frontend.api.openai.store.stored import new_response_id
from dynamo.frontend.config import CapacityOptions
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.fake_records import FakeRecords
from tests.support.http_edge import Speaker
from tests.support.storing import Storing, stored_responses, storing
from tests.support.waiting import counting_turns

PATH = "/v1/responses"
MIB = 2**20


def client_of(s: Storing) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{s.edge.url}/v1", api_key="none", max_retries=0)


async def test_a_response_continues_its_conversation_and_becomes_part_of_it() -> None:
    speaker = Speaker()
    async with storing(speaker) as s, client_of(s) as client:
        conversation = await client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "I am Ada."}], metadata={"topic": "names"}
        )
        first = await client.responses.create(model="talker", input="Who am I?", conversation=conversation.id)
        assert speaker.prompt == "<user>I am Ada.\n<user>Who am I?\n<assistant>"
        assert first.conversation is not None and first.conversation.id == conversation.id
        await client.responses.create(model="talker", input="And you?", conversation={"id": conversation.id}, store=False)
        assert speaker.prompt.startswith("<user>I am Ada.\n<user>Who am I?\n<assistant>Hello you\n<user>And you?")
        items = (await client.conversations.items.list(conversation.id, order="asc")).data
        texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
        assert texts == ["I am Ada.", "Who am I?", "Hello you", "And you?", "Hello you"]
        assert len({item.id for item in items}) == len(items)


@pytest.mark.parametrize("fields", [{"stream": True}, {"background": True}])
async def test_a_response_is_added_before_it_is_complete(fields: dict[str, Any]) -> None:
    async with storing(Speaker()) as s, client_of(s) as client:
        conversation = await client.conversations.create()
        created = await s.edge.post(PATH, {"model": "talker", "input": "Hi", "conversation": conversation.id} | fields)
        if "background" in fields:
            async with asyncio.timeout(120):
                while (await s.read(created.json()["id"]))["status"] == "queued":
                    await asyncio.sleep(0)
        else:
            assert "response.completed" in created.text
        items = await client.conversations.items.list(conversation.id)
        assert [item.role for item in items.data if item.type == "message"] == ["assistant", "user"]


async def test_openais_client_reads_changes_and_deletes_conversations_and_items() -> None:
    async with storing(Speaker()) as s, client_of(s) as client:
        made = await client.conversations.create(metadata={"a": "1"})
        added = await client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": text} for text in ("one", "two", "three")]
        )
        assert (await client.conversations.update(made.id, metadata={"b": "2"})).metadata == {"b": "2"}
        second = added.data[1].id or ""
        item: Any = await client.conversations.items.retrieve(second, conversation_id=made.id)
        assert item.content[0].text == "two"
        await client.conversations.items.delete(second, conversation_id=made.id)
        with pytest.raises(NotFoundError, match=r"item '.*' is not found"):
            await client.conversations.items.retrieve(second, conversation_id=made.id)
        left = [item async for item in client.conversations.items.list(made.id, limit=1)]
        assert [item.content[0].text for item in left if item.type == "message"] == ["three", "one"]  # type: ignore[union-attr]
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(NotFoundError, match=r"conversation '.*' is not found"):
            await client.conversations.retrieve(made.id)
        with pytest.raises(NotFoundError, match=r"conversation '.*' is not found"):
            await client.responses.create(model="talker", input="Hi", conversation=made.id)


async def test_a_response_whose_conversation_is_deleted_meanwhile_fails() -> None:
    records = FakeRecords()
    talker = Speaker()

    def respond(stream: Any) -> None:
        records.records.clear()
        talker(stream)

    async with storing(respond, records=records) as s, client_of(s) as client:
        for stream in (False, True):
            made = await client.conversations.create()
            response = await s.edge.post(PATH, {"model": "talker", "input": "Hi", "conversation": made.id, "stream": stream})
            assert f"conversation '{made.id}' is not found" in response.text
            assert "response.completed" not in response.text


def long_input(size: int) -> list[dict[str, Any]]:
    """Return items of so many characters, of which a prompt has few."""
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x" * size}]}
    return [thought, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("fields", [{"store": False}, {"stream": True, "store": False}, {"background": True}])
async def test_input_for_which_a_conversation_has_no_room_is_refused_before_anything_is_generated(fields: dict[str, Any]) -> None:
    speaker = Speaker()
    async with storing(speaker, quota=StoredBytes(lambda owner: 2000)) as s:
        conversation = (await s.edge.post("/v1/conversations", {})).json()["id"]
        request = {"model": "talker", "input": long_input(2000), "conversation": conversation} | fields
        refused = await s.edge.post(PATH, request)
        assert (refused.status_code, speaker.requests) == (413, [])
        assert "of its 2000 bytes" in refused.text
        assert (await s.edge.http.get(f"/v1/conversations/{conversation}/items")).json()["data"] == []
        await s.create(input=long_input(600), conversation=conversation, store=False)
        assert len((await s.edge.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]) == 3


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_input_counts_once_before_and_after_it_is_added_to_a_conversation(fields: dict[str, Any]) -> None:
    quota = StoredBytes(lambda owner: 10_000)
    async with storing(Speaker(), quota=quota) as s:
        conversation = (await s.edge.post("/v1/conversations", {})).json()["id"]
        request = {"model": "talker", "input": long_input(3000), "conversation": conversation, "store": True} | fields
        created = await s.edge.post(PATH, request)
        assert created.status_code == 200, created.text
        if "background" in fields:
            await s.reached(created.json()["id"], "completed")
        with pytest.raises(PayloadTooLarge, match=r"has stored [6-9]... of its 10000 bytes"):
            await quota.check("", 10_000)


async def test_requests_at_the_same_time_count_together_what_they_are_to_add() -> None:
    store = stored_responses(FakeRecords(), quota=StoredBytes(lambda owner: 1000)).conversations
    items = [{"type": "message", "content": "x" * 600}]
    async with store.room("", items) as give_back:
        with pytest.raises(PayloadTooLarge):
            async with store.room("", items):
                pass
        give_back()
        async with store.room("", items):
            pass


async def test_items_of_stored_responses_are_referred_to() -> None:
    """As clients do that keep the ids of what they got, and send these instead of the items."""
    speaker = Speaker()
    async with storing(speaker) as s:
        first = await s.create(input="Hi")
        asked = (await s.edge.http.get(f"{PATH}/{first['id']}/input_items")).json()["data"][0]["id"]
        references = [{"type": "item_reference", "id": id} for id in (asked, first["output"][0]["id"])]
        second = await s.create(input=[*references, {"role": "user", "content": "More"}])
        assert speaker.prompt == "<user>Hi\n<assistant>Hello you\n<user>More\n<assistant>"
        await s.edge.http.delete(f"{PATH}/{first['id']}")
        gone = await s.edge.post(PATH, {"model": "talker", "input": references})
        assert (gone.status_code, "items are kept as long as their response" in gone.text) == (404, True)
        await s.create(input="Again", previous_response_id=second["id"])
        assert speaker.prompt.count("<user>Hi\n") == 1  # stored with the second response
        for nameless in ({"type": "item_reference"}, {"type": "item_reference", "id": ""}):
            error = await s.edge.error(PATH, {"model": "talker", "input": [nameless]})
            assert error["message"] == "an 'item_reference' needs 'id'"


async def test_an_item_that_is_there_already_is_added_under_an_id_of_its_own() -> None:
    """Else lists, which are paged by ids, would never end."""
    speaker = Speaker()
    async with storing(speaker) as s, client_of(s) as client:
        conversation = (await client.conversations.create()).id
        first = await s.create(conversation=conversation, input=[{"id": "a", "role": "user", "content": "Hi"}] * 2)
        said = first["output"][0]
        again = [said, {"type": "item_reference", "id": said["id"]}, {"type": "item_reference", "id": "a"}]
        for _ in range(2):
            await s.create(conversation=conversation, input=again)
        ids = [item.id async for item in client.conversations.items.list(conversation, limit=1)]
        assert len(ids) == len(set(ids)) == 3 + 2 * 4
        assert {"a", said["id"]} < set(ids)
        last = await s.create(previous_response_id=first["id"], input=[said])
        assert speaker.prompt.count("<assistant>Hello you\n") == 2
        ids = [item.id async for item in client.responses.input_items.list(last["id"], limit=1)]
        assert len(ids) == len(set(ids)) == 4


async def test_a_request_refers_to_a_bounded_number_of_responses() -> None:
    stored = stored_responses(FakeRecords())
    references = []
    for _ in range(65):
        id = new_response_id()
        item = {"id": ItemIds(id, output=False).new("message"), "type": "message"}
        response = ResponseObject(id=id, created_at=1, model="m", reasoning={}, text={}, status="completed")
        await stored.save("", response, [item])
        references.append(item | {"type": "item_reference"})
    ids = ItemIds(new_response_id(), output=False)
    assert len(await stored.resolved("", references[:64], [], ids)) == 64
    with pytest.raises(InvalidRequest, match="64 responses"):
        await stored.resolved("", references, [], ids)
    with pytest.raises(NotFound):
        await stored.resolved("another key", references[:1], [], ids)


async def test_what_references_stand_for_is_bounded_before_it_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of some kilobytes could else become gigabytes."""
    monkeypatch.setattr(items_module, "MAX_BYTES", 5_000)
    async with storing(Speaker()) as s:
        first = await s.create(input=[{"id": "long", "role": "user", "content": "x" * 1_000}])
        references = [{"type": "item_reference", "id": "long"}] * 5
        for size, status in ((3, 200), (5, 413)):
            body = {"model": "talker", "input": references[:size], "previous_response_id": first["id"], "store": False}
            assert (await s.edge.post(PATH, body)).status_code == status


async def test_responses_that_end_at_once_all_add_their_items() -> None:
    store = stored_responses(FakeRecords()).conversations
    id = (await store.create("", [{"id": "0"}], {})).id
    await asyncio.gather(*(store.add("", id, [{"id": str(number)}]) for number in range(1, 8)))
    await store.add("", id, [])
    assert sorted(item["id"] for item in await store.items("", id)) == [str(number) for number in range(8)]
    await store.delete_item("", id, "5")
    with pytest.raises(NotFound, match="item '5' is not found"):
        await store.delete_item("", id, "5")


async def test_however_many_responses_end_at_once_all_add_their_items() -> None:
    class Slow(FakeRecords):
        async def put(self, key: str, value: bytes, **options: Any) -> int | None:
            await asyncio.sleep(0)  # others read meanwhile
            return await super().put(key, value, **options)

    store = stored_responses(Slow()).conversations
    id = (await store.create("", [], {})).id
    await asyncio.gather(*(store.add("", id, [{"id": str(number)}]) for number in range(100)))
    assert sorted(int(item["id"]) for item in await store.items("", id)) == [*range(100)]


async def test_a_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "MAX_BYTES", 1000)
    store = stored_responses(FakeRecords()).conversations
    id = (await store.create("", [], {})).id
    await store.add("", id, [{"text": "x" * 500}])
    with pytest.raises(PayloadTooLarge, match="1000"):
        await store.add("", id, [{"text": "x" * 500}])
    assert len(await store.items("", id)) == 1


async def test_a_conversation_has_a_bounded_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item takes time where a conversation is read, however short it is."""
    monkeypatch.setattr(items_module, "MAX_ITEMS", 5)
    store = stored_responses(FakeRecords()).conversations
    with pytest.raises(PayloadTooLarge, match="up to 5"):
        await store.create("", [{}] * 6, {})
    id = (await store.create("", [{}] * 3, {})).id
    with pytest.raises(PayloadTooLarge, match="up to 5"):
        await store.add("", id, [{}] * 3)
    await store.add("", id, [{}] * 2)
    assert len(await store.items("", id)) == 5


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user"},
        {"type": "function_call", "call_id": "1", "name": "f"},
        {"type": "function_call_output", "call_id": "1"},
        {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]},
        {"type": "item_reference"},
    ],
)
async def test_an_item_that_no_response_could_continue_does_not_get_into_a_conversation(item: dict[str, Any]) -> None:
    async with storing(Speaker()) as s:
        created = (await s.edge.post("/v1/conversations", {})).json()["id"]
        valid = {"role": "user", "content": "Hi", "id": ""}
        for path in ("/v1/conversations", f"/v1/conversations/{created}/items"):
            refused = await s.edge.post(path, {"items": [valid, item]})
            assert (refused.status_code, refused.json()["error"]["param"][:8]) == (400, "items[1]"), refused.text
        added = (await s.edge.post(f"/v1/conversations/{created}/items", {"items": [valid]})).json()["data"]
        assert added[0]["id"].startswith("msg_")
        await s.create(input="Go on", conversation=created)


async def test_an_unknown_conversation_is_not_found_before_anything_is_generated() -> None:
    speaker = Speaker()
    async with storing(speaker) as s:
        for unknown in ("", "conv_1", {"id": ""}):
            response = await s.edge.post(PATH, {"model": "talker", "input": "Hi", "conversation": unknown})
            assert response.status_code == 404
        assert not speaker.requests


async def test_others_have_their_turns_while_a_large_conversation_is_parsed() -> None:
    items = [{"id": str(number), "text": "x" * 10_000} for number in range(100)]
    async with counting_turns() as turns:
        assert await parse_items(msgspec.json.encode(items)) == items
    assert turns[0] > 10


async def test_others_have_their_turns_while_a_large_response_is_stored() -> None:
    records = FakeRecords()
    stored = stored_responses(records)
    items = [{"id": str(number), "text": "x" * 10_000} for number in range(100)]
    response = ResponseObject(
        id=new_response_id(), created_at=0, status="completed", model="m", reasoning={}, text={}, output=items
    )
    async with counting_turns() as turns:
        assert await stored.save("", response, None, last=0)
        assert turns[0] > 10
        turns[0] = 0
        other_response = msgspec.structs.replace(response, id=new_response_id(), output=())
        assert await stored.save("", other_response, items, last=0)
        assert turns[0] > 10
    assert msgspec.json.decode((await stored.read("", response.id))["output"]) == items
    assert await stored.items("", other_response.id) == items
    with pytest.raises(PayloadTooLarge):
        await encode_items([{"text": "x" * 2**19}] * 40)
    exact = (items_module.MAX_BYTES - 3) // 2 - len('{"text":""}')
    assert len(bytes(await encode_items([{"text": "x" * exact}] * 2))) in range(
        items_module.MAX_BYTES - 1, items_module.MAX_BYTES + 1
    )


@dataclass(frozen=True, slots=True)
class ThreadOfParsers(OutputParsers):
    """Notes the thread in which a conversation is made text."""

    threads: list[int] = field(default_factory=list)

    def choose(self, llm: LlmInfo, *, with_tools: bool) -> tuple[ParserKind, ...]:
        self.threads.append(threading.get_ident())
        return OutputParsers.choose(self, llm, with_tools=with_tools)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_a_short_request_with_a_large_conversation_is_made_text_beside_the_event_loop_and_held(path: str) -> None:
    parsers = ThreadOfParsers({}, {})
    async with storing(Speaker(), parsers=parsers) as s:
        many = {"role": "user", "content": [{"type": "input_text", "text": ""}] * 5_000}
        for item in ({"role": "user", "content": "a"}, many):
            made = (await s.edge.post("/v1/conversations", {"items": [item]})).json()
            body = {"model": "talker", "input": "Hi", "conversation": made["id"]}
            await s.edge.post(path, body)
        with s.edge.capacity.holding() as others:
            others.hold(CapacityOptions().max_buffered_bytes - MIB)
            assert (await s.edge.post(path, body)).status_code == 503
    assert [thread == threading.get_ident() for thread in parsers.threads] == [True, False]


async def test_what_openai_refuses_of_conversations_is_refused() -> None:
    item = {"role": "user", "content": "x"}
    async with storing(Speaker()) as s:
        for body in (
            {"items": [item] * 21},
            {"metadata": {str(number): "" for number in range(17)}},
            {"metadata": {"a": "x" * 513}},
        ):
            assert (await s.edge.post("/v1/conversations", body)).status_code == 400
        s.records.is_away = True
        assert (await s.edge.post("/v1/conversations", {})).status_code == 503


@pytest.mark.parametrize("is_made", [True, False])
async def test_items_whose_write_was_not_confirmed_are_added_if_they_are_there(is_made: bool) -> None:
    """Else a client that gets an error, and so tries again, adds them twice."""

    class Late(FakeRecords):
        is_late = False

        async def put(self, key: str, value: bytes, **more: Any) -> int | None:
            revision = await super().put(key, value, **more) if is_made or not self.is_late else 0
            if self.is_late:
                raise WriteUnconfirmed("no response in time")
            return revision

    records = Late()
    conversations = stored_responses(records).conversations
    id = (await conversations.create("", [], {})).id
    records.is_late = True
    if is_made:
        await conversations.add("", id, [{"id": "1"}])
    else:
        with pytest.raises(WriteUnconfirmed):
            await conversations.add("", id, [{"id": "1"}])
    assert await conversations.items("", id) == ([{"id": "1"}] if is_made else [])
