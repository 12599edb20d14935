"""Long work on the event loop, a step at a time."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import Overloaded
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work, finish


class Turns:
    """Counts the turns of the event loop, and is a clock on which each reading takes a second, so that each step is one yield."""

    def __init__(self) -> None:
        self.number = 0
        self._now = 0.0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)

    def __call__(self) -> float:
        self._now += 0.003
        return self._now

    def stop(self) -> None:
        self._task.cancel()


async def test_a_turn_of_the_loop_takes_one_step_of_all_work_together_and_none_is_left_behind() -> None:
    turns = Turns()
    steps = Steps(turns)
    taken: list[tuple[int, str]] = []

    def work(name: str) -> Work[str]:
        for _ in range(5):
            taken.append((turns.number, name))
            yield 0
        return name

    results = await asyncio.gather(*(steps.run(work(name), lambda _: None) for name in "abc"))
    turns.stop()
    assert results == ["a", "b", "c"]
    assert len({turn for turn, _ in taken}) == len(taken) == 15
    assert [name for _, name in taken] == ["a", "b", "c"] * 5


async def test_owners_have_turns_however_many_requests_each_has() -> None:
    turns, running = Turns(), [""]
    steps = Steps(turns, owner=lambda: running[0])
    taken: list[str] = []

    def work(name: str) -> Work[None]:
        for _ in range(3):
            taken.append(name)
            yield 0

    tasks = []
    for owner, count in (("a", 20), ("b", 2)):
        running[0] = owner
        tasks += [asyncio.create_task(steps.run(work(f"{owner}{number}"), lambda _: None)) for number in range(count)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    turns.stop()
    assert len(taken) == 66
    assert max(index for index, name in enumerate(taken) if name[0] == "b") < 16


async def test_a_request_that_leaves_gives_its_turn_to_the_next() -> None:
    turns = Turns()
    steps = Steps(turns)
    done: list[str] = []

    def work(name: str) -> Work[None]:
        yield 0
        yield 0
        done.append(name)

    tasks = [asyncio.create_task(steps.run(work(name), lambda _: None)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()  # while it waits
    while not done:
        await asyncio.sleep(0)
    for task in tasks[2:]:
        task.cancel()  # perhaps as it has its turn
        await asyncio.sleep(0)
    last = asyncio.create_task(steps.run(work("e"), lambda _: None))
    await asyncio.gather(*tasks, last, return_exceptions=True)
    turns.stop()
    assert done[0] == "a"
    assert done[-1] == "e"


async def test_memory_is_counted_before_it_is_taken() -> None:
    held: list[int] = []
    taken: list[int] = []

    def work() -> Work[None]:
        for size in (10, 20, 30):
            yield size
            taken.append(size)

    def hold(size: int) -> None:
        assert taken == held
        if size == 30:
            raise Overloaded("full")
        held.append(size)

    with pytest.raises(Overloaded):
        await Steps().run(work(), hold)
    assert taken == [10, 20]


async def test_cancelled_work_ends_within_a_step() -> None:
    steps = Steps(Turns())
    ended = asyncio.Event()
    taken = 0

    def work() -> Work[None]:
        nonlocal taken
        try:
            while True:
                taken += 1
                yield 0
        finally:
            ended.set()

    task = asyncio.create_task(steps.run(work(), lambda _: None))
    while taken < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and taken <= 4
    assert await steps.run(work_of(7), lambda _: None) == 7  # whose turn it is now


def work_of(result: int) -> Work[int]:
    yield 0
    return result


def test_short_work_is_done_at_once() -> None:
    assert finish(work_of(3)) == 3
