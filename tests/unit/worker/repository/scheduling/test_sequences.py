"""Slots of sequences, and the owners that share them, of a model that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest
from dynamo.common.tensors.request import SEQUENCE_OWNER, SEVERAL_OWNERS
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult
from dynamo.worker.repository.scheduling.sequences import SequenceModel, UnknownSequence
from tests.support.virtual_time import in_virtual_time

SLOTS = 4
IDLE_S = 60


class Instance:
    """An instance that responds after `takes_s`, but to requests with a negative value not before `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.takes_s = 0.0

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        if any(float(request.inputs["x"][0, 0]) < 0 for request in requests):
            await self.go.wait()
        return [ModelResult({"y": request.inputs["x"]}) for request in requests]

    async def close(self) -> None: ...


class Model:
    """A model of one instance with `SLOTS` slots, whose sequences end after `IDLE_S`, and its clients."""

    def __init__(self) -> None:
        text = f"max_batch_size: 1 sequence_batching {{ oldest {{ max_candidate_sequences: {SLOTS} }} "
        text += f"max_sequence_idle_microseconds: {IDLE_S * 1_000_000} }}"
        self.instance = Instance()
        self._model = SequenceModel(text_format.Parse(text, ModelConfig(name="m")), [self.instance], Path())

    def send(self, owner: str, id: int, flags: str = "", value: float = 0.0) -> asyncio.Task[ModelResult]:
        """Send a request of a sequence. `flags`: "s" for START, "e" for END."""
        parameters = {"sequence_id": id, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
        context = Context("r", headers={SEQUENCE_OWNER: owner} if owner else {})
        request = ModelRequest({"x": np.full((1, 1), value, np.float32)}, context, parameters=parameters)
        return asyncio.create_task(self._model.respond(request))

    async def begin(self, owner: str, *ids: int) -> None:
        for id in ids:
            await self.send(owner, id, "s")

    async def knows(self, owner: str, *ids: int) -> list[bool]:
        """Return whether each sequence goes on, which a request of it finds out."""
        outcomes = await asyncio.gather(*(self.send(owner, id) for id in ids), return_exceptions=True)
        assert all(isinstance(outcome, ModelResult | UnknownSequence) for outcome in outcomes), outcomes
        return [isinstance(outcome, ModelResult) for outcome in outcomes]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@in_virtual_time
async def test_an_owner_with_all_slots_gives_up_those_that_were_idle_for_longest_for_an_owner_with_none() -> None:
    model, loop = Model(), asyncio.get_running_loop()
    for id in range(SLOTS):
        await model.begin("a", id + 1)
        await asyncio.sleep(1)
    await model.send("a", 1)  # so that the second is idle for longest
    begun = loop.time()
    await model.begin("b", 11, 12)
    assert loop.time() == begun
    assert await model.knows("b", 11, 12) == [True, True]
    assert await model.knows("a", 1, 2, 3, 4) == [True, False, False, True]


@in_virtual_time
async def test_owners_give_up_nothing_for_one_that_has_as_many_but_for_one_slot() -> None:
    model = Model()
    await model.begin("a", 1, 2)
    await model.begin("b", 11, 12)
    waiting = [model.send("a", 3, "s"), model.send("b", 13, "s")]
    await settled()
    assert not any(task.done() for task in waiting)
    assert await model.knows("a", 1, 2) == await model.knows("b", 11, 12) == [True, True]
    await model.send("b", 11, "e")
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in waiting] == [False, True]  # it had one by then, and the other two
    await asyncio.wait(waiting)  # until one was idle for too long


@in_virtual_time
async def test_a_sequence_that_has_a_request_is_not_given_up_before_it_is_served() -> None:
    model = Model()
    held = [model.send("a", id, "s", -1.0) for id in range(1, SLOTS + 1)]
    await settled()
    other = model.send("b", 11, "s")
    await settled()
    assert not other.done()
    model.instance.go.set()
    await asyncio.gather(*held, other)
    assert sum(await model.knows("a", *range(1, SLOTS + 1))) == SLOTS - 1


@in_virtual_time
async def test_an_owner_that_always_has_requests_in_all_slots_gives_one_up_for_an_owner_that_has_waited_for_2_s() -> None:
    model, loop = Model(), asyncio.get_running_loop()
    model.instance.takes_s = 0.1
    await model.begin("a", *range(1, SLOTS + 1))

    async def keep(id: int) -> None:
        while True:
            await model.send("a", id)

    busy = {id: [asyncio.create_task(keep(id)) for _ in range(3)] for id in range(1, SLOTS + 1)}
    await settled()
    begun = loop.time()
    async with asyncio.timeout(60):
        await model.begin("b", 11)
    assert loop.time() - begun == pytest.approx(2, abs=0.5)
    await asyncio.sleep(1)
    assert {id for id, tasks in busy.items() if any(task.done() for task in tasks)} == {SLOTS}, "the last to begin"
    for task in busy[SLOTS]:
        assert isinstance(task.exception(), EngineError | UnknownSequence)
    for task in (task for tasks in busy.values() for task in tasks):
        task.cancel()


@in_virtual_time
async def test_a_free_slot_is_for_the_owner_that_has_the_fewest_in_whichever_order_they_came() -> None:
    model = Model()
    held = [model.send("a", id, "s", -1.0) for id in range(1, SLOTS + 1)]
    await settled()
    more, other = model.send("a", 9, "s"), model.send("b", 11, "s")
    held[0].cancel()
    await settled()
    model.instance.go.set()
    await asyncio.wait([more, other], return_when=asyncio.FIRST_COMPLETED)
    assert (more.done(), other.done()) == (False, True)
    more.cancel()
    await asyncio.wait(held)


@pytest.mark.parametrize("owner", ["", "a"])
@in_virtual_time
async def test_one_owner_alone_may_have_all_slots_until_its_sequences_are_idle_for_long(owner: str) -> None:
    model, loop = Model(), asyncio.get_running_loop()
    begun = loop.time()
    await model.begin(owner, *range(1, SLOTS + 1))
    late = [model.send(owner, id, "se") for id in (7, 8)]
    await settled()
    assert not any(task.done() for task in late)
    assert all(await model.knows(owner, *range(1, SLOTS + 1)))
    await asyncio.gather(*late)
    assert loop.time() - begun == pytest.approx(IDLE_S)


@in_virtual_time
async def test_a_call_for_requests_of_several_owners_begins_and_joins_no_sequence() -> None:
    model = Model()
    for flags in "s", "se", "":
        with pytest.raises(InvalidRequest, match=r"sequence 1 may be of several keys.* trace=request.trace\(\)"):
            await model.send(f"{SEVERAL_OWNERS}a{SEVERAL_OWNERS}b", 1, flags)
    await model.begin("a", 1)
