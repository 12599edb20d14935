"""How many blocks are computed again, by KV events."""

from __future__ import annotations

import pytest

from dynamo.common.kv.events import KvUpdate
from dynamo.common.kv.hashes import pack_hashes
from dynamo.frontend.router.evictions import Evictions
from tests.support.fakes import instance

FLEET = (instance(1), instance(2))
A, B = (each.id for each in FLEET)
SAMPLED_ONE_IN = 4


def blocks(start: int, count: int) -> bytes:
    return pack_hashes(range(start * SAMPLED_ONE_IN, (start + count) * SAMPLED_ONE_IN))


def cycle(evictions: Evictions, new: int, again: int, turns: int = 100) -> None:
    """A computes blocks in turns, some of which are new, and others it has evicted the turn before."""
    for turn in range(1, turns + 1):
        first = turn * (new + again)
        evictions.apply(A, KvUpdate(turn, removed=blocks(first - new - again, new + again)))
        evictions.apply(A, KvUpdate(turn, stored=blocks(first - again, new + again)))


@pytest.mark.parametrize(("new", "again", "further"), [(10, 0, 0.0), (30, 10, 1 / 3), (10, 10, 1.0), (0, 40, 4.0)])
def test_blocks_that_were_evicted_and_are_computed_again_cause_further_ones(new: int, again: int, further: float) -> None:
    evictions = Evictions()
    cycle(evictions, new, again)
    assert evictions.rows(FLEET) == [pytest.approx(further, rel=0.01), 0.0], "B has room: what is computed there evicts nothing"


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_instance_that_has_been_emptied_or_is_gone_evicts_nothing(is_gone: bool) -> None:
    evictions = Evictions()
    cycle(evictions, 10, 10)
    before = evictions.epoch
    if is_gone:
        evictions.remove_instance(A)
    else:
        evictions.apply(A, KvUpdate(0, cleared=True))
    assert evictions.rows(FLEET) == [0.0, 0.0]
    assert evictions.epoch > before


def test_a_block_counts_wherever_it_is_computed_again_if_that_instance_is_full() -> None:
    evictions = Evictions()
    evictions.apply(A, KvUpdate(1, removed=blocks(0, 1000)))
    evictions.apply(B, KvUpdate(1, stored=blocks(0, 500)))
    assert evictions.share == 0.0
    evictions.apply(B, KvUpdate(2, removed=blocks(5000, 1)))
    evictions.apply(B, KvUpdate(3, stored=blocks(500, 500)))
    assert evictions.share > 0.0


def test_only_so_many_evicted_blocks_are_remembered_the_last_ones_among_them() -> None:
    evictions = Evictions()
    for start in range(0, 1_000_000, 1000):
        evictions.apply(A, KvUpdate(1, removed=blocks(start, 1000)))
    assert evictions.remembered <= 70_000
    evictions.apply(A, KvUpdate(2, stored=blocks(0, 1000)))
    assert evictions.share == 0.0, "forgotten"
    evictions.apply(A, KvUpdate(3, stored=blocks(970_000, 1000)))
    assert evictions.share > 0.0
