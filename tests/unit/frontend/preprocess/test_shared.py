from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import Unavailable
from dynamo.frontend.preprocess.shared import Shared

pytestmark = pytest.mark.usefixtures("no_collector")
"""What is evicted must go by its reference count."""


class Value:
    def __init__(self, name: str) -> None:
        self.name = name


class Maker:
    """Makes values of 10 bytes when `go` is set, and keeps the names of those it was called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, name: str) -> Value:
        self.calls.append(name)
        await self.go.wait()
        if self.failures:
            self.failures -= 1
            raise Unavailable(f"{name} cannot be read")
        return Value(name)


def shared(maker: Maker, max_bytes: int = 25) -> Shared[str, Value]:
    return Shared(maker, lambda value: 10, max_bytes)


async def test_callers_that_want_the_same_value_wait_for_one_making() -> None:
    maker = Maker()
    values = shared(maker)
    first, second = await asyncio.gather(values.load("a"), values.load("a"))
    assert first is second is values.get("a") is await values.load("a")
    assert maker.calls == ["a"]


async def test_a_caller_that_is_cancelled_leaves_the_making_to_the_others() -> None:
    maker = Maker()
    maker.go.clear()
    values = shared(maker)
    impatient, patient = asyncio.create_task(values.load("a")), asyncio.create_task(values.load("a"))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    maker.go.set()
    assert (await patient).name == "a"
    assert impatient.cancelled()
    assert maker.calls == ["a"]


async def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    maker = Maker()
    maker.failures = 1
    values = shared(maker)
    failures = await asyncio.gather(values.load("a"), values.load("a"), return_exceptions=True)
    assert list(map(type, failures)) == [Unavailable, Unavailable]
    assert len(values) == 0
    assert (await values.load("a")).name == "a"


async def test_the_least_recently_used_values_are_evicted_beyond_the_bound() -> None:
    values = shared(Maker())
    await values.load("a")
    await values.load("b")
    assert values.get("a") is not None
    await values.load("c")
    assert ["a" in values, "b" in values, "c" in values] == [True, False, True]


async def test_values_in_use_stay_however_many_there_are_until_they_are_given_back() -> None:
    maker = Maker()
    values = shared(maker)
    used = [await values.load(name) for name in "abcd"]
    assert len(values) == 4
    assert await values.load("a") is used[0]
    used.clear()
    await values.load("e")
    assert len(values) == 2
    assert maker.calls == ["a", "b", "c", "d", "e"]


async def test_there_is_room_while_another_value_of_that_size_evicts_none() -> None:
    values = shared(Maker())
    assert values.has_room
    await values.load("a")
    assert values.has_room
    await values.load("b")
    assert not values.has_room


async def test_closing_stops_what_is_being_made() -> None:
    maker = Maker()
    maker.go.clear()
    values = shared(maker)
    waiting = asyncio.create_task(values.load("a"))
    await asyncio.sleep(0)
    assert "a" in values
    await values.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(values) == 0
