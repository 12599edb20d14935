"""How many blocks are computed again, by KV events."""

from __future__ import annotations

import random

import pytest

from dynamo.common.kv.events import KvUpdate
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.evictions import Evictions
from tests.support.fakes import instance

FLEET = (instance(1), instance(2))
A, B = (each.id for each in FLEET)
SAMPLED_ONE_IN = 4


def evictions_of(cached: int = 10_000) -> Evictions:
    return Evictions(lambda: cached)


def blocks(start: int, count: int) -> bytes:
    return pack_hashes(range(start * SAMPLED_ONE_IN, (start + count) * SAMPLED_ONE_IN))


def cycle(evictions: Evictions, new: int, again: int, turns: int = 100, instance: InstanceId = A) -> None:
    """An instance computes blocks in turns, some of which are new, and others it has evicted the turn before."""
    for turn in range(1, turns + 1):
        first = turn * (new + again) + instance * 1_000_000
        evictions.apply(instance, KvUpdate(turn, removed=blocks(first - new - again, new + again)))
        evictions.apply(instance, KvUpdate(turn, stored=blocks(first - again, new + again)))


def further(evictions: Evictions) -> list[float]:
    return [row.further for row in evictions.rows(FLEET)]


@pytest.mark.parametrize(("new", "again", "expected"), [(10, 0, 0.0), (30, 10, 1 / 3), (10, 10, 1.0), (0, 40, 4.0)])
def test_blocks_that_were_evicted_and_are_computed_again_cause_further_ones(new: int, again: int, expected: float) -> None:
    evictions = evictions_of()
    cycle(evictions, new, again)
    assert further(evictions) == [pytest.approx(expected, rel=0.01), 0.0], "B has room: what is computed there evicts nothing"


def test_what_one_instance_reports_does_not_count_for_the_others() -> None:
    evictions = evictions_of()
    cycle(evictions, 30, 10, instance=B)
    for turn in range(500):
        evictions.apply(A, KvUpdate(turn, removed=blocks(0, 64)))
        evictions.apply(A, KvUpdate(turn, stored=blocks(0, 64)))
    assert further(evictions) == [4.0, pytest.approx(1 / 3, rel=0.01)]


def test_a_single_batch_of_blocks_changes_the_share_little() -> None:
    evictions = evictions_of()
    cycle(evictions, 30, 10)
    evictions.apply(A, KvUpdate(1, removed=blocks(9_000_000, 10)))
    evictions.apply(A, KvUpdate(1, stored=blocks(9_000_000, 10)))
    assert further(evictions)[0] == pytest.approx(0.52, abs=0.05)


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_instance_that_has_been_emptied_or_is_gone_evicts_nothing(is_gone: bool) -> None:
    evictions = evictions_of()
    cycle(evictions, 10, 10)
    before = evictions.epoch
    if is_gone:
        evictions.remove_instance(A)
    else:
        evictions.apply(A, KvUpdate(0, cleared=True))
    assert further(evictions) == [0.0, 0.0]
    assert evictions.epoch > before, "rows that were read before are void"


def test_an_instance_that_is_cleared_once_it_is_gone_leaves_nothing_behind() -> None:
    evictions = evictions_of()
    cycle(evictions, 10, 10)
    evictions.remove_instance(A)
    before = repr(evictions)
    evictions.apply(A, KvUpdate(0, cleared=True))
    assert repr(evictions) == before


def test_rows_stay_up_to_date() -> None:
    evictions = evictions_of()
    row, _ = evictions.rows(FLEET)
    cycle(evictions, 10, 10)
    assert row.is_full and row.further == pytest.approx(1.0, rel=0.01)


def test_a_block_counts_wherever_it_is_computed_again_but_only_once_and_if_that_instance_is_full() -> None:
    evictions = evictions_of()
    evictions.apply(A, KvUpdate(1, removed=blocks(0, 1000)))
    evictions.apply(B, KvUpdate(1, stored=blocks(0, 500)))
    assert further(evictions) == [0.0, 0.0]
    evictions.apply(B, KvUpdate(2, removed=blocks(5000, 1)))
    evictions.apply(B, KvUpdate(3, stored=blocks(500, 500)))
    first = further(evictions)[1]
    assert first > 0.0
    evictions.apply(B, KvUpdate(4, stored=blocks(500, 500)))
    assert further(evictions)[1] < first


def test_only_so_many_evicted_blocks_are_remembered_the_last_ones_among_them() -> None:
    evictions = evictions_of()
    for start in range(0, 1_000_000, 1000):
        evictions.apply(A, KvUpdate(1, removed=blocks(start, 1000)))
    assert evictions.remembered <= 70_000
    evictions.apply(A, KvUpdate(2, stored=blocks(0, 1000)))
    assert further(evictions)[0] == 0.0, "forgotten"
    evictions.apply(A, KvUpdate(3, stored=blocks(970_000, 1000)))
    assert further(evictions)[0] > 0.0
    for each in (A, B):
        evictions.remove_instance(each)
    assert evictions.remembered == 0


def test_in_a_large_fleet_what_it_takes_long_to_evict_is_remembered_too() -> None:
    rng = random.Random(0)
    hashes = [rng.getrandbits(64) for _ in range(640_000)]
    evictions = evictions_of(len(hashes))
    for turn in range(3):
        for start in range(0, len(hashes), 64):
            part = pack_hashes(hashes[start : start + 64])
            if turn:
                evictions.apply(A, KvUpdate(1, stored=part))
            evictions.apply(A, KvUpdate(1, removed=part))
    assert further(evictions)[0] == 4.0
    assert evictions.remembered <= 70_000
