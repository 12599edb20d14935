"""The events of a response whose log probabilities are many times as long as its text."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from dynamo.common.errors import PayloadTooLarge
from dynamo.common.generation import FinishReason, Summary
from dynamo.frontend.api.openai.response_objects import TokenLogprob
from dynamo.frontend.api.openai.store.event_log import EventLog
from dynamo.frontend.api.openai.store.events import ResponseObject, ResponseWriter
from dynamo.frontend.api.openai.store.items import encode_items
from dynamo.frontend.api.openai.store.stored import new_response_id
from dynamo.frontend.preprocess.parsers import Content
from tests.support.fake_records import FakeRecords
from tests.support.storing import stored_responses
from tests.support.waiting import counting_turns

TOKENS = 10_000


def written() -> tuple[ResponseObject, list[bytes]]:
    """Return a response, and the pieces of its events after those of the tokens."""
    response = ResponseObject(id=new_response_id(), created_at=1, model="m", reasoning={}, text={})
    writer = ResponseWriter(response, stream=True)
    for number in range(TOKENS):
        writer.add(Content("a"), [TokenLogprob(f"a\0{number}", -1.0, None, [])])
    writer.take()
    whole = writer.finish(FinishReason.STOP, Summary(), 2.0)
    writer.end(whole)
    return whole, writer.take()


def shown(logprobs: list[dict[str, Any]]) -> bool:
    return [token["token"] for token in logprobs] == [f"a\0{number}" for number in range(TOKENS)]


def test_all_events_at_the_end_share_one_copy_of_log_probabilities() -> None:
    _, pieces = written()
    long = [piece for piece in pieces if len(piece) > 30_000]
    assert len(long) == 4 * len({id(piece) for piece in long}) > 4
    assert max(map(len, pieces)) < 100_000, "nothing long is joined at the end"
    text, part, item, end = [json.loads(event.partition(b"data: ")[2]) for event in b"".join(pieces).split(b"\n\n")[:-1]]
    assert shown(text["logprobs"])
    assert shown(part["part"]["logprobs"])
    assert shown(item["item"]["content"][0]["logprobs"])
    assert shown(end["response"]["output"][0]["content"][0]["logprobs"])


async def test_events_are_stored_in_records_of_a_bounded_size() -> None:
    records = FakeRecords()
    response, pieces = written()
    log = EventLog(stored_responses(records), "", response)
    log.add([b"x" * 600_000 + b"\n\n", *pieces])
    async with log.writing():
        pass
    chunks = {int(key.rpartition(".")[2]): record.value for key, record in records.records.items() if ".events." in key}
    counts = [chunks[number].count(b"\n\n") for number in sorted(chunks)]
    assert sorted(chunks) == [*itertools.accumulate(counts[:-1], initial=0)] and sum(counts) == 6
    assert max(map(len, chunks.values())) < 2 * 2**20


async def test_log_probabilities_that_are_too_many_to_be_stored_are_not_put_together() -> None:
    block = msgspec.Raw(b"0," * 500_000 + b"0")
    content = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": [block] * 17}]
    with pytest.raises(PayloadTooLarge):
        await encode_items([{"type": "message", "content": content, "which": "cannot be encoded", "as": object()}])


async def test_a_long_response_and_what_it_responded_to_are_put_together_in_steps() -> None:
    stored = stored_responses(FakeRecords())
    response, _ = written()
    question = {"type": "message", "role": "user", "content": "x" * 100_000}
    async with counting_turns() as turns:
        assert await stored.save("", response, [question]) is not None
        assert turns[0] >= 3


async def test_items_that_make_a_conversation_too_long_are_not_joined_to_it() -> None:
    conversations = stored_responses(FakeRecords()).conversations
    item = {"type": "message", "role": "user", "content": "x" * (9 << 20)}
    id = (await conversations.create("", [item], {})).id
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            await conversations.add("", id, [item])
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 3.5 * 9 * 2**20, "the item as JSON, in brackets, and what is read; and not both as one"
    finally:
        tracemalloc.stop()


async def test_an_event_that_is_too_long_to_be_stored_is_not_put_together() -> None:
    response, _ = written()
    log = EventLog(stored_responses(FakeRecords()), "", response)
    log.add([b"x" * 2**20] * 17 + [b"\n\n"])
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            async with log.writing():
                pass
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


async def test_what_continues_a_response_gets_no_log_probabilities_of_it() -> None:
    stored = stored_responses(FakeRecords())
    response, _ = written()
    assert await stored.save("", response, [{"type": "message", "role": "user", "content": "Hi"}]) is not None
    read = await stored.read("", response.id)
    assert shown(msgspec.json.decode(read["output"])[0]["content"][0]["logprobs"])
    question, answer = await stored.history("", response.id)
    assert question["content"] == "Hi"
    assert answer["content"] == [{"type": "output_text", "text": "a" * TOKENS, "annotations": [], "logprobs": []}]
