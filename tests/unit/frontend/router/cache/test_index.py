"""The index against a plain model of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.kv.tiers import SLOW_TIERS, Tier, TierChange
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache import holders
from dynamo.frontend.router.cache.index import Positions, PrefixIndex
from dynamo.frontend.router.cache.predicted import PredictedIndex
from tests.support.memory import kept_objects

A, B, C = InstanceId(10), InstanceId(20), InstanceId(30)


def h(number: int) -> int:
    """A hash of full width."""
    return number * 0x9E3779B97F4A7C15 % 2**64


SLOTS = st.sets(st.one_of(st.integers(0, 12), st.integers(0, 5000)), max_size=9)


@given(SLOTS, st.integers(0, 12) | st.integers(0, 5000))
def test_a_set_of_slots_is_one_integer(slots: set[int], slot: int) -> None:
    value = holders.EMPTY
    for each in sorted(slots, key=lambda each: each * 7919 % 10007):  # some order
        value = holders.with_slot(value, each)
    assert value == holders.from_mask(sum(1 << each for each in slots))
    assert holders.mask(value) == sum(1 << each for each in slots)
    assert holders.contains(value, slot) == (slot in slots)
    assert holders.without_slot(value, slot) == holders.from_mask(sum(1 << each for each in slots - {slot}))
    assert holders.with_slot(value, slot) == holders.from_mask(sum(1 << each for each in slots | {slot}))
    assert holders.single(slot) == holders.with_slot(holders.EMPTY, slot)


def test_overlap_counts_the_leading_blocks_held() -> None:
    index = PrefixIndex()
    prompt = [h(n) for n in range(6)]
    index.store(A, prompt[:2])
    index.store(B, prompt)
    index.store(C, [h(77), *prompt[1:3]])  # not from the first block on
    assert index.overlaps(prompt) == {A: 2, B: 6}
    assert index.overlaps(prompt[:1]) == {A: 1, B: 1}
    assert index.overlaps([h(99), *prompt]) == {}
    assert index.overlaps([]) == {}


def test_a_block_that_is_removed_ends_the_overlap() -> None:
    index = PrefixIndex()
    prompt = [h(n) for n in range(4)]
    index.store(A, prompt)
    index.store(B, prompt)
    index.apply(A, KvUpdate(0, removed=pack_hashes(prompt[2:])))
    assert index.overlaps(prompt) == {A: 2, B: 4}
    index.remove(B, [h(1000)])
    index.remove(C, prompt)
    assert index.overlaps(prompt) == {A: 2, B: 4}
    index.remove(A, prompt)
    index.remove(B, prompt)
    assert len(index) == 0


def test_a_snapshot_replaces_the_previous_blocks() -> None:
    index = PrefixIndex()
    index.store(A, [h(1), h(2)])
    index.store(B, [h(1)])
    index.replace(A, KvSnapshot(5, pack_hashes([h(1), h(3)])))
    assert index.held(A) == {h(1), h(3)}
    assert index.overlaps([h(1), h(2)]) == {A: 1, B: 1}


def test_a_removed_instance_is_out_of_matches_at_once_and_of_memory_after_a_sweep() -> None:
    index = PrefixIndex()
    index.store(A, [h(n) for n in range(5000)])
    index.store(B, [h(0)])
    index.remove_instance(A)
    assert index.overlaps([h(0), h(1)]) == {B: 1}
    assert index.instances() == [B]
    while index.sweep(100):
        pass
    assert len(index) == 1


def test_a_slot_is_used_again_only_after_the_sweep() -> None:
    index = PrefixIndex()
    index.store(A, [h(1), h(2)])
    index.remove_instance(A)
    index.store(B, [h(1)])
    assert index.slot(B) == 1
    assert index.overlaps([h(1), h(2)]) == {B: 1}
    while index.sweep():
        pass
    index.store(C, [h(2)])
    assert index.slot(C) == 0
    assert index.overlaps([h(1), h(2)]) == {B: 1}


def test_updates_sweep_in_passing() -> None:
    index = PrefixIndex()
    for generation in range(6000):
        index.apply(A, KvUpdate(generation, stored=pack_hashes([h(generation)]), cleared=True))
    assert len(index) < 4500
    assert (index.slot(A) or 0) < 4500


def test_instances_that_leave_together_are_swept_by_the_updates_of_others() -> None:
    index = PrefixIndex()
    leaving = [InstanceId(number) for number in range(100, 400)]
    for instance in leaving:
        index.store(instance, [h(10 * instance + number) for number in range(10)])
    for instance in leaving:
        index.apply(instance, KvUpdate(0, cleared=True))
    assert len(index) == 3000, "their removal took no longer than that of one"
    for number in range(4 * 4096):
        index.apply(A, KvUpdate(number, stored=pack_hashes([h(1)])))
    assert len(index) == 1


class Counting(list[int]):
    """Hashes that count how many of them were looked at."""

    looked_at = 0

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        Counting.looked_at += 1
        return list.__getitem__(self, at)


@pytest.mark.parametrize(("guess", "most"), [(5000, 4), (0, 16), (100, 17), (7000, 17)])
def test_a_correctly_guessed_overlap_is_found_at_once(guess: int, most: int) -> None:
    index = PrefixIndex()
    prompt = Counting(h(n) for n in range(8192))
    index.store(A, prompt[:5000])
    Counting.looked_at = 0
    assert index.match(prompt, guess).groups == [(5000, 1)]
    assert Counting.looked_at <= most


def test_long_prompts_are_matched_with_few_lookups() -> None:
    index = PrefixIndex()
    prompt = Counting(h(n) for n in range(8192))
    for number in range(100):
        index.store(InstanceId(number), prompt[: 1 if number > 3 else 2000 * (number + 1)])
    Counting.looked_at = 0
    overlaps = index.overlaps(prompt)
    assert {number: overlaps[InstanceId(number)] for number in range(5)} == {0: 2000, 1: 4000, 2: 6000, 3: 8000, 4: 1}
    assert Counting.looked_at < 100


# Random prefixes: a tree in which every block has one parent, as hashes of token sequences have.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
INSTANCES = st.sampled_from([A, B, C])


def blocks_of(path: Sequence[int]) -> list[int]:
    return [h(hash(tuple(path[: at + 1])) % 2**64) for at in range(len(path))]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "evict", "clear", "snapshot", "gone", "sweep"]), INSTANCES, PATHS),
    max_size=30,
)


@settings(max_examples=300)
@given(CHANGES, st.lists(PATHS, min_size=1, max_size=4))
def test_the_index_equals_a_plain_model(changes: list[tuple[str, InstanceId, list[int]]], prompts: list[list[int]]) -> None:
    index = PrefixIndex()
    model: dict[InstanceId, set[int]] = {A: set(), B: set(), C: set()}
    children: dict[int, set[int]] = {}
    for kind, instance, path in changes:
        blocks = blocks_of(path)
        for parent, child in pairwise(blocks):
            children.setdefault(parent, set()).add(child)
        own = model[instance]
        match kind:
            case "store":
                own.update(blocks)
                index.apply(instance, KvUpdate(0, stored=pack_hashes(blocks)))
            case "evict":  # leaves first, as engines do
                gone = [block for block in blocks if block in own and not children.get(block, set()) & own]
                own.difference_update(gone)
                index.apply(instance, KvUpdate(0, removed=pack_hashes(gone)))
            case "clear":
                own.clear()
                own.update(blocks)
                index.apply(instance, KvUpdate(0, stored=pack_hashes(blocks), cleared=True))
            case "snapshot":
                own.clear()
                own.update(blocks)
                index.replace(instance, KvSnapshot(0, pack_hashes(blocks)))
            case "gone":
                own.clear()
                index.remove_instance(instance)
            case _:
                index.sweep(1000)
    for instance, own in model.items():
        assert index.held(instance) == own
    for prompt in prompts:
        blocks = blocks_of(prompt)
        expected = {}
        for instance, own in model.items():
            overlap = next((at for at, block in enumerate(blocks) if block not in own), len(blocks))
            if overlap:
                expected[instance] = overlap
        assert index.overlaps(blocks) == expected
        found = index.match(blocks).by_position(
            Positions({index.slot(instance) or 0: at for at, instance in enumerate(expected)})
        )
        assert found == dict(enumerate(expected.values()))
        for guess in range(len(blocks) + 2):
            assert index.match(blocks, guess) == index.match(blocks)
    while index.sweep():
        pass
    assert len(index) == len(set().union(*model.values()))


def test_guesses_expire_unless_they_are_used_again() -> None:
    predicted = PredictedIndex(ttl_s=2.0)
    prompt = [h(n) for n in range(4)]
    predicted.add(A, prompt, computed_at=0.0)
    predicted.add(A, prompt[:2], computed_at=1.0)
    assert predicted.match(prompt, now=1.9).groups == [(4, 1)]
    assert predicted.match(prompt, now=2.0).groups == [(2, 1)]
    assert predicted.match(prompt, now=3.0).groups == ()
    assert len(predicted) == 0
    assert len(predicted.index) == 0


def test_the_oldest_guesses_are_pruned_to_the_ratio() -> None:
    predicted = PredictedIndex(ttl_s=1000.0, max_blocks=100, prune_ratio=0.5)
    for number in range(11):
        predicted.add(A, [h(10 * number + n) for n in range(10)], computed_at=float(number))
    assert len(predicted) == len(predicted.index) == 50
    assert predicted.match([h(100)], now=11.0).groups == [(1, 1)]
    assert predicted.match([h(50)], now=11.0).groups == ()


def test_the_same_guess_over_and_over_takes_bounded_memory() -> None:
    predicted = PredictedIndex(ttl_s=1000.0, max_blocks=10)
    kept = []
    for number in range(1000):
        predicted.add(A, [h(1), h(2)], computed_at=float(number))
        if number < 300 or number % 7 == 0:  # counting takes longer than adding
            kept.append(kept_objects(predicted))
    assert max(kept) <= max(kept[:300])
    assert predicted.match([h(1), h(2)], now=1000.0).groups == [(2, 1)]


def test_guesses_about_an_instance_that_left_are_forgotten() -> None:
    predicted = PredictedIndex(ttl_s=2.0)
    predicted.add(A, [h(1)], computed_at=0.0)
    predicted.add(B, [h(1)], computed_at=0.0)
    predicted.remove_instance(A)
    assert predicted.index.overlaps([h(1)]) == {B: 1}
    predicted.add(A, [h(2)], computed_at=1.0)
    predicted.expire(2.5)
    assert predicted.index.overlaps([h(2)]) == {A: 1}
    assert len(predicted) == 1


def test_overlaps_of_a_large_group_are_unpacked() -> None:
    index = PrefixIndex()
    for number in range(1001):
        index.store(InstanceId(number), [h(1), h(2)] if number >= 100 else [h(1)])
    match = index.match([h(1), h(2), h(3)])
    slots = [index.slot(InstanceId(number)) for number in range(1001)]
    positions = Positions({slot: at for at, slot in enumerate(slots) if slot is not None and at % 2})
    for _ in range(2):
        assert match.by_position(positions) == {at: 2 if at >= 100 else 1 for at in range(1, 1001, 2)}


def test_positions_of_masks_are_right_however_many_there_have_been() -> None:
    positions = Positions({slot: slot + 100 for slot in range(0, 12, 2)})
    for mask in range(1 << 12):
        assert positions.of(mask) == [slot + 100 for slot in range(0, 12, 2) if mask >> slot & 1]
    assert kept_objects(positions) < 1000


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.booleans(), st.lists(st.integers(0, 9), unique=True)), max_size=30))
def test_the_blocks_of_an_instance_are_counted_whatever_it_says(changes: list[tuple[InstanceId, bool, list[int]]]) -> None:
    index = PrefixIndex()
    for instance, is_stored, blocks in changes:
        hashes = pack_hashes([h(block) for block in blocks])
        index.apply(instance, KvUpdate(0, stored=hashes) if is_stored else KvUpdate(0, removed=hashes, cleared=not blocks))
        for each in (A, B, C):
            assert index.held_blocks(each) == len(index.held(each))


PLACES = st.lists(
    st.tuples(
        st.sampled_from([A, B]),
        st.sampled_from([Tier.GPU, *SLOW_TIERS]),
        st.sampled_from(["store", "remove", "snapshot", "clear", "gone", "sweep"]),
        st.integers(0, 3),
        st.integers(0, 7),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(PLACES)
def test_the_index_equals_a_plain_model_of_all_tiers(changes: list[tuple[InstanceId, Tier, str, int, int]]) -> None:
    index = PrefixIndex()
    model: dict[InstanceId, dict[Tier, set[int]]] = {each: {tier: set() for tier in Tier} for each in (A, B)}
    prompts = [[h(100 * (prompt if at > 2 else 0) + at) for at in range(7)] for prompt in range(4)]
    for instance, tier, kind, prompt, count in changes:
        own, blocks = model[instance], prompts[prompt]
        stored = pack_hashes(blocks[:count])
        match kind:
            case "store":
                own[tier].update(blocks[:count])
                index.apply(instance, KvUpdate(0, stored=stored) if tier is Tier.GPU else in_tier(tier, stored=stored))
            case "remove":  # the ends of all prompts that share this
                gone = [block for each in prompts for block in each[count:]]
                own[tier].difference_update(gone)
                removed = pack_hashes(gone)
                index.apply(instance, KvUpdate(0, removed=removed) if tier is Tier.GPU else in_tier(tier, removed=removed))
            case "snapshot":
                model[instance] = {each: set() for each in Tier} | {Tier.GPU: set(blocks), Tier.CPU: set(blocks[:count])}
                slow = (TierChange("cpu", stored), TierChange("tape", pack_hashes(blocks)))
                index.replace(instance, KvSnapshot(0, pack_hashes(blocks), slow))
            case "clear":
                model[instance] = {each: set() for each in Tier}
                index.apply(instance, KvUpdate(0, cleared=True))
            case "gone":
                model[instance] = {each: set() for each in Tier}
                index.remove_instance(instance)
            case _:
                index.sweep(1000)
    for instance, own in model.items():
        assert {tier: index.held(instance, tier) for tier in Tier} == own
        assert index.held_blocks(instance) == sum(map(len, own.values()))
    slots = {index.slot(each): at for at, each in enumerate((A, B, C)) if index.slot(each) is not None}
    positions = Positions({slot: at for slot, at in slots.items() if slot is not None})
    for blocks in prompts:
        for tier, match in index.match_slow(blocks):
            found = match.by_position(positions, 3)
            for at, instance in enumerate((A, B, C)):
                here = set().union(*(held for each, held in model.get(instance, {}).items() if is_fast(each, tier)))
                if tier is Tier.SHARED:
                    here |= set().union(*(own[tier] for own in model.values()))
                expected = next((at for at, block in enumerate(blocks) if block not in here), len(blocks))
                on_gpu = index.overlaps(blocks).get(instance, 0)  # all that one without slower tiers has
                assert max(found.get(at, 0), on_gpu) == expected


def is_fast(tier: Tier, slowest: Tier) -> bool:
    order = [Tier.GPU, *SLOW_TIERS]
    return tier is not Tier.SHARED and order.index(tier) <= order.index(slowest)


def in_tier(tier: Tier, stored: bytes = b"", removed: bytes = b"") -> KvUpdate:
    return KvUpdate(0, tiers=(TierChange(tier.value, stored, removed),))


def test_a_fleet_that_caches_on_gpus_only_has_no_slower_tier() -> None:
    index = PrefixIndex()
    index.apply(A, KvUpdate(0, stored=pack_hashes([h(1)]), tiers=(TierChange("tape", pack_hashes([h(2)])),)))
    assert (index.tiers, index.match_slow([h(1)])) == ((), [])
    index.apply(A, in_tier(Tier.DISK, stored=pack_hashes([h(2)])))
    index.apply(A, in_tier(Tier.CPU, stored=pack_hashes([h(2)])))
    assert index.tiers == (Tier.CPU, Tier.DISK), "the fastest first"


def test_a_retired_instance_leaves_every_tier() -> None:
    index = PrefixIndex()
    index.apply(A, in_tier(Tier.CPU, stored=pack_hashes([h(1), h(2)])))
    index.remove_instance(A)
    while index.sweep():
        pass
    index.store(B, [h(9)])
    assert index.slot(B) == 0
    assert index.held(B, Tier.CPU) == set()
