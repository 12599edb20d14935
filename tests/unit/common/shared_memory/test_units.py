"""The allocator of an arena against a model: a set of units in use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from dynamo.common.shared_memory.units import Units


class AllocatorMachine(RuleBasedStateMachine):
    """Runs never overlap, no unit is lost, and whatever fits into the largest free block is granted."""

    runs = Bundle("runs")

    @initialize(count=st.integers(1, 200))
    def create(self, count: int) -> None:
        self.units = Units(count)
        self.used: dict[int, int] = {}

    @rule(target=runs, count=st.integers(1, 70))
    def allocate(self, count: int) -> object:
        start = self.units.allocate(count)
        if start is None:
            return multiple()
        taken = set(range(start, start + count))
        assert start >= 0 and start + count <= self.units.count
        assert all(taken.isdisjoint(range(other, other + length)) for other, length in self.used.items())
        self.used[start] = count
        return start

    @rule(start=consumes(runs))
    def release(self, start: int) -> None:
        self.units.release(start)
        del self.used[start]

    @rule(start=runs, chance=st.floats(0, 1))
    def shorten(self, start: int, chance: float) -> None:
        count = 1 + int(chance * (self.used[start] - 1))
        self.units.shorten(start, count)
        self.used[start] = count

    @precondition(lambda self: not self.used)
    @rule()
    def take_the_longest_block(self) -> None:
        longest = 1 << (self.units.count.bit_length() - 1)
        start = self.units.allocate(longest)
        assert start is not None, "what is free does not merge again"
        self.units.release(start)

    @invariant()
    def every_unit_is_free_or_in_one_run(self) -> None:
        assert self.units.free == self.units.count - sum(self.used.values())


TestAllocator = AllocatorMachine.TestCase


def blocks_of(units: Units) -> list[int]:
    """Take everything, the longest blocks first, and return their lengths."""
    lengths = []
    for level in reversed(range(units.count.bit_length())):
        while units.allocate(1 << level) is not None:
            lengths.append(1 << level)
    return lengths


@given(count=st.integers(1, 500), lengths=st.lists(st.integers(1, 40), max_size=60), rng=st.randoms())
def test_after_any_use_free_units_are_as_connected_as_at_the_start(count: int, lengths: list[int], rng: random.Random) -> None:
    units = Units(count)
    starts = [start for length in lengths if (start := units.allocate(length)) is not None]
    rng.shuffle(starts)
    for start in starts:
        units.release(start)
    assert blocks_of(units) == blocks_of(Units(count))


def test_a_run_takes_no_more_than_its_length_of_a_longer_block() -> None:
    units = Units(64)
    assert units.allocate(33) == 0
    assert units.free == 31
    assert all(units.allocate(count) is not None for count in (16, 8, 4, 2, 1))
    assert units.free == 0


def test_what_was_released_last_is_used_first() -> None:
    units = Units(64)
    runs = [units.allocate(8) for _ in range(8)]
    for start in (runs[1], runs[6], runs[3]):
        assert start is not None
        units.release(start)
    assert units.allocate(8) == runs[3]


def test_releasing_what_is_not_in_use_is_an_error() -> None:
    units = Units(8)
    start = units.allocate(2)
    assert start is not None
    units.release(start)
    with pytest.raises(KeyError):
        units.release(start)


def test_many_returned_runs_become_blocks_again() -> None:
    units = Units(1024)
    starts = [units.allocate(1) for _ in range(1024)]
    for start in starts:
        assert start is not None
        units.release(start)
    assert units.free == 1024
    assert blocks_of(units) == [1024]
