"""API keys take turns where grammars are compiled, and what was compiled is remembered within bounds."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import Overloaded
from dynamo.worker.engine.llama.grammars.memory import MAX_BYTES, MAX_RESPONSE_BYTES, CompiledMemory
from dynamo.worker.engine.llama.grammars.turns import Turns
from tests.support.waiting import WAIT_S


class Work:
    """Work of several keys, each of which takes as long as it says."""

    def __init__(self, most: int = 64) -> None:
        self.now = 0.0
        self.turns = Turns(most, lambda: self.now)
        self.done: list[str] = []

    async def of(self, key: str, name: str = "", seconds: float = 1.0) -> None:
        async with self.turns.turn(key):
            await asyncio.sleep(0)
            self.now += seconds
            self.done.append(name or key)


async def test_the_key_that_used_least_is_next_and_of_one_key_what_has_waited_longest() -> None:
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        for name in ("a1", "a2", "a3"):
            tasks.create_task(work.of("a", name))
        for name in ("b1", "b2"):
            tasks.create_task(work.of("b", name, 0.1))
    assert work.done == ["a1", "b1", "b2", "a2", "a3"]


async def test_a_key_that_comes_after_many_slow_ones_waits_for_the_present_one_only() -> None:
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            for _ in range(2):
                tasks.create_task(work.of(f"slow{number}"))
        while len(work.done) < 20:
            await asyncio.sleep(0)
        tasks.create_task(work.of("quick"))
    assert work.done.index("quick") in (20, 21)


async def test_a_key_with_many_short_ones_takes_turns_too() -> None:
    work = Work()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(work.of("a", seconds=0.0))
        for _ in range(2):
            tasks.create_task(work.of("b", seconds=0.0))
    assert work.done == ["a", "b", "a", "b", "a"]


async def test_what_a_key_has_used_is_forgotten() -> None:
    work = Work()
    await work.of("a", seconds=1.0)
    work.now += 3600.0
    await work.of("b", seconds=0.5)
    async with asyncio.TaskGroup() as tasks:
        for key in ("c", "b", "a"):
            tasks.create_task(work.of(key, seconds=0.0))
    assert work.done[2:] == ["c", "a", "b"]


async def test_when_too_many_wait_the_key_with_most_of_them_loses_its_last_one() -> None:
    work = Work(most=3)
    present = [asyncio.ensure_future(work.of("a", f"a{number}")) for number in range(4)]
    other = asyncio.ensure_future(work.of("b"))
    with pytest.raises(Overloaded, match="3 grammars are waiting"):
        await present[3]
    await asyncio.gather(other, *present[:3])
    assert work.done == ["a0", "b", "a1", "a2"]


async def test_a_key_that_has_most_of_what_waits_gets_no_more() -> None:
    work = Work(most=2)
    present = [asyncio.ensure_future(work.of("a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await work.of("a")
    await asyncio.gather(*present)


@pytest.mark.parametrize("steps", range(6))
async def test_one_that_leaves_at_any_time_passes_its_turn_on(steps: int) -> None:
    work = Work()
    first, leaving, last = (asyncio.ensure_future(work.of(key)) for key in ("first", "leaving", "last"))
    for _ in range(steps):
        await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(first, last)
        await asyncio.wait([leaving])
        await work.of("another")
    assert work.done[-1] == "another"


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    memory = CompiledMemory()
    response = bytes(MAX_RESPONSE_BYTES)
    memory.add(b"kept", b"k")
    for number in range(100):
        memory.add(b"%d" % number, response)
        assert memory.find(b"kept") == b"k"
        assert memory.size_bytes <= MAX_BYTES
    assert memory.find(b"99") == response
    assert memory.find(b"0") is None


def test_many_small_ones_are_bounded_too_and_a_large_one_is_not_remembered() -> None:
    memory = CompiledMemory()
    for number in range(100_000):
        memory.add(b"%d" % number, b"")
    assert memory.size_bytes <= MAX_BYTES
    assert memory.find(b"0") is None
    memory.add(b"large", bytes(MAX_RESPONSE_BYTES + 1))
    assert memory.find(b"large") is None
