"""A worker's copy of its KV cache, and readers that follow it over a bad bus."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.kv.events import (
    MAX_UPDATE_BLOCKS,
    KvMessage,
    KvSnapshot,
    KvState,
    KvUpdate,
    LoadMessage,
    LoadReport,
    StepTotals,
    encode_message,
    load_message_decoder,
    message_encoder,
    read_message,
    snapshot_decoder,
)
from dynamo.common.kv.hashes import HASH_BYTES, pack_hashes
from dynamo.common.kv.tiers import Tier, TierChange
from dynamo.frontend.fleet.kv.archive import cut, fold
from dynamo.frontend.fleet.kv.follow import Follower

Blocks = set[tuple[Tier, int]]
"""Blocks with the tiers that they are on."""


def apply(blocks: Blocks, update: KvUpdate) -> None:
    if update.cleared:
        blocks.clear()
    for tier, change in [(Tier.GPU, update), *((change.tier or Tier.GPU, change) for change in update.tiers)]:
        blocks.difference_update((tier, block) for block in change.removed_hashes)
        blocks.update((tier, block) for block in change.stored_hashes)


def of_snapshot(snapshot: KvSnapshot) -> Blocks:
    slow = {(change.tier or Tier.GPU, block) for change in snapshot.tiers for block in change.stored_hashes}
    return {(Tier.GPU, block) for block in snapshot.hashes} | slow


def test_changes_of_one_step_travel_as_one_numbered_update() -> None:
    state = KvState()
    state.store([1, 2, 3])
    state.remove([3])
    state.store([4])
    update = state.take_update()
    assert update is not None
    assert (update.number, update.stored_hashes, update.removed_hashes, update.cleared) == (0, [1, 2, 4], [], False)
    state.remove([2, 99])
    state.store([1])
    update = state.take_update()
    assert update is not None
    assert (update.number, update.stored_hashes, update.removed_hashes) == (1, [], [2])


def test_blocks_stored_and_removed_within_a_step_are_not_published() -> None:
    state = KvState()
    state.store([1])
    state.take_update()
    state.remove([1])
    state.store([1, 2])
    state.remove([2])
    assert not state.changed
    assert state.take_update() is None
    assert state.number == 0


def test_a_clear_forgets_the_rest_of_its_step() -> None:
    state = KvState()
    state.store([1, 2])
    state.take_update()
    state.remove([1])
    state.store([3])
    state.clear()
    state.store([4])
    update = state.take_update()
    assert update is not None
    assert (update.stored_hashes, update.removed_hashes, update.cleared) == ([4], [], True)
    assert len(state) == 1


def test_a_block_counts_while_any_rank_holds_it() -> None:
    state = KvState()
    state.store([1, 2], rank=0)
    state.store([2, 3], rank=1)
    state.take_update()
    state.remove([2], rank=0)
    assert state.take_update() is None
    state.clear(rank=1)
    update = state.take_update()
    assert update is not None
    assert (sorted(update.removed_hashes), update.cleared) == ([2, 3], False)
    assert 1 in state


def test_updates_are_kept_for_readers_that_missed_a_few() -> None:
    state = KvState(log_bytes=400)
    for block in range(5):
        state.store([block])
        state.take_update()
    assert [update.number for update in state.since(3) or ()] == [3, 4]
    assert list(state.since(5) or ()) == []
    assert state.since(0) is None  # no longer kept
    assert state.since(6) is None  # never made


def test_the_wire_form_costs_eight_bytes_per_block() -> None:
    update = KvUpdate(7, stored=bytes(8 * 100))
    message = encode_message("m", update)
    assert len(message) <= 8 * 100 + 12
    assert read_message(message) == KvMessage("m", update)
    snapshot = KvSnapshot(3, bytes(16))
    assert snapshot_decoder.decode(message_encoder.encode(snapshot)) == snapshot
    received = LoadMessage("m", LoadReport(waiting=1, kv_number=4))
    assert load_message_decoder.decode(message_encoder.encode(received)) == received


BLOCKS = st.lists(st.integers(0, 12), max_size=6)
KIND = st.sampled_from(["store", "remove", "clear tier", "clear"])
TIER = st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU, Tier.SHARED])
STEP = st.lists(st.tuples(KIND, BLOCKS, st.integers(0, 1), TIER), max_size=5)
Step = list[tuple[str, list[int], int, Tier]]


def run_step(state: KvState, truth: dict[int, Blocks], step: Step) -> None:
    for kind, blocks, rank, tier in step:
        own, changed = truth[rank], {(tier, block) for block in blocks}
        if kind == "store":
            state.store(blocks, rank, tier)
            own.update(changed)
        elif kind == "remove":
            state.remove(blocks, rank, tier)
            own.difference_update(changed)
        elif kind == "clear tier":
            state.clear(rank, tier)
            own.difference_update([each for each in own if each[0] is tier])
        else:
            state.clear(rank)
            own.clear()


@given(st.lists(STEP, max_size=8))
def test_updates_and_snapshots_equal_the_truth(steps: list[Step]) -> None:
    state, truth, reader = KvState(), {0: Blocks(), 1: Blocks()}, Blocks()
    for step in steps:
        run_step(state, truth, step)
        early = state.snapshot()
        update = state.take_update()
        if update is not None:
            apply(reader, update)
            late = of_snapshot(early)
            apply(late, update)  # a snapshot taken in the middle of a step, followed by that step's update
            assert late == reader
        assert reader == truth[0] | truth[1] == of_snapshot(state.snapshot())
        assert len(state) == len({block for tier, block in reader if tier is Tier.GPU})


@dataclass
class Reader:
    """A router's end: a follower and the blocks that it leads to."""

    follower: Follower = field(default_factory=lambda: Follower(max_kept=4))
    blocks: Blocks = field(default_factory=set)

    def take(self, updates: list[KvUpdate]) -> None:
        for update in updates:
            apply(self.blocks, update)

    def repair(self, state: KvState) -> None:
        """Asks as often as the follower wants, over a bus that works again."""
        self.follower.announced(state.number)
        while self.follower.is_behind:
            since = self.follower.request_from()
            updates = None if since is None else state.since(since)
            if updates is not None:
                self.take(self.follower.recovered(updates))
                continue
            snapshot = state.snapshot()
            ready = self.follower.snapshot(snapshot)
            assert ready is not None
            self.blocks = of_snapshot(snapshot)
            self.take(ready)


@settings(max_examples=200)
@given(st.lists(STEP, max_size=12), st.integers(0, 2**32), st.sampled_from([200, 600, 1 << 20]))
def test_a_reader_is_exact_again_after_losses_repeats_and_reordering(steps: list[Step], seed: int, log_bytes: int) -> None:
    rng, state, truth, reader = Random(seed), KvState(log_bytes), {0: Blocks(), 1: Blocks()}, Reader()
    on_the_way: list[KvUpdate] = []
    stale: KvSnapshot | None = None
    for step in steps:
        run_step(state, truth, step)
        update = state.take_update()
        if update is not None:
            on_the_way.extend([update] * rng.choice([0, 1, 1, 1, 2]))
        rng.shuffle(on_the_way)
        while on_the_way and rng.random() < 0.6:
            reader.take(reader.follower.update(on_the_way.pop()))
        if stale is not None and rng.random() < 0.5 and (ready := reader.follower.snapshot(stale)) is not None:
            reader.blocks = of_snapshot(stale)
            reader.take(ready)
        stale = state.snapshot() if rng.random() < 0.3 else stale
    for update in on_the_way:
        reader.take(reader.follower.update(update))
    reader.repair(state)
    assert reader.blocks == truth[0] | truth[1]


def test_a_lost_end_of_the_stream_shows_by_the_announced_number() -> None:
    follower = Follower()
    assert follower.is_behind
    assert follower.request_from() is None  # only a snapshot helps
    assert follower.snapshot(KvSnapshot(number=4)) == []
    assert not follower.is_behind
    follower.announced(6)
    assert follower.is_behind
    assert follower.request_from() == 5


def test_an_old_snapshot_does_not_undo_newer_updates() -> None:
    follower = Follower()
    follower.snapshot(KvSnapshot(number=4))
    assert [update.number for update in follower.update(KvUpdate(5))] == [5]
    assert follower.snapshot(KvSnapshot(number=4)) is None


def test_updates_that_came_early_wait_for_the_missing_one() -> None:
    follower = Follower()
    follower.snapshot(KvSnapshot())
    assert follower.update(KvUpdate(1)) == []
    assert follower.is_behind
    assert [update.number for update in follower.update(KvUpdate(0))] == [0, 1]
    assert not follower.is_behind
    assert follower.update(KvUpdate(1)) == []


def test_an_update_that_clears_needs_nothing_from_before() -> None:
    follower = Follower()
    assert follower.update(KvUpdate(3)) == []
    assert [update.number for update in follower.update(KvUpdate(2, cleared=True))] == [2, 3]
    assert not follower.is_behind


def test_an_announced_number_that_was_never_made_causes_one_request() -> None:
    follower = Follower()
    follower.snapshot(KvSnapshot(number=4))
    assert follower.update(KvUpdate(7)) == []
    assert follower.is_behind
    assert follower.request_from() == 5
    assert [update.number for update in follower.recovered([KvUpdate(5)])] == [5]
    assert not follower.is_behind
    assert [update.number for update in follower.update(KvUpdate(6))] == [6]  # and not 7, too


def test_a_copy_on_a_slow_tier_leaves_the_gpu_alone_and_outlives_it() -> None:
    state = KvState()
    state.store([1, 2])
    state.store([1, 2], tier=Tier.CPU)
    state.take_update()
    state.remove([2])
    update = state.take_update()
    assert update == KvUpdate(1, removed=pack_hashes([2])), "nothing else changed"
    assert (set(state.held()), set(state.held(Tier.CPU)), set(state.held(Tier.DISK))) == ({1}, {1, 2}, set())


def test_clearing_one_tier_leaves_the_others() -> None:
    state = KvState()
    state.store([1, 2])
    state.store([2, 3], tier=Tier.CPU)
    state.take_update()
    state.clear(tier=Tier.GPU)
    update = state.take_update()
    assert update is not None
    assert (sorted(update.removed_hashes), update.cleared, set(state.held(Tier.CPU))) == ([1, 2], False, {2, 3})
    state.clear()
    update = state.take_update()
    assert update is not None
    assert (update.cleared, update.tiers, list(state.held(Tier.CPU))) == (True, (), [])


class UpdateOfBefore(msgspec.Struct, frozen=True, array_like=True):
    """An update as processes of the version without tiers read it."""

    number: int
    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False


def test_a_peer_of_the_version_before_reads_no_block_of_a_slow_tier() -> None:
    update = KvUpdate(3, pack_hashes([1]), pack_hashes([2]), False, (TierChange("cpu", pack_hashes([7])),))
    _, read = msgspec.msgpack.decode(encode_message("m", update), type=tuple[str, UpdateOfBefore])
    assert read == UpdateOfBefore(3, pack_hashes([1]), pack_hashes([2]))
    old = msgspec.msgpack.encode(("m", read))
    assert read_message(old).update == KvUpdate(3, pack_hashes([1]), pack_hashes([2]))


def test_an_update_without_slow_tiers_has_the_bytes_that_it_always_had() -> None:
    update = KvUpdate(3, pack_hashes([1]), pack_hashes([2]))
    assert encode_message("m", update) == msgspec.msgpack.encode(("m", UpdateOfBefore(3, update.stored, update.removed)))


def test_a_tier_that_is_not_known_is_named_and_no_gpu() -> None:
    update = KvUpdate(0, tiers=(TierChange("tape", pack_hashes([1])), TierChange("gpu", pack_hashes([2]))))
    assert [change.tier for change in read_message(encode_message("m", update)).update.tiers] == [None, None]


@pytest.mark.parametrize(
    "tiers",
    [
        (TierChange("cpu", b"1234567"),),
        (TierChange("cpu", removed=b"1"),),
        (TierChange("cpu"),) * 9,
        (TierChange("cpu", bytes(8 * MAX_UPDATE_BLOCKS)), TierChange("disk", bytes(8))),
    ],
)
def test_updates_with_odd_tiers_are_refused(tiers: tuple[TierChange, ...]) -> None:
    with pytest.raises(ValueError):
        read_message(encode_message("m", KvUpdate(0, tiers=tiers)))


def test_an_update_has_no_more_blocks_than_it_may_whatever_their_tiers() -> None:
    state, blocks = KvState(), Blocks()
    state.store(range(MAX_UPDATE_BLOCKS - 10))
    state.store(range(20), tier=Tier.CPU)
    state.store(range(MAX_UPDATE_BLOCKS + 1), tier=Tier.DISK)
    updates = []
    while (update := state.take_update()) is not None:
        assert update.hash_bytes <= 8 * MAX_UPDATE_BLOCKS
        apply(blocks, update)
        updates.append(update)
    assert len(updates) == 3
    assert blocks == of_snapshot(state.snapshot()) == of_snapshot(fold(None, updates, 1 << 20) or KvSnapshot())


def test_a_fold_of_recorded_updates_is_what_was_held() -> None:
    state = KvState()
    updates = []
    for blocks in ([1, 2], [3], [4, 5]):
        state.store(blocks)
        state.store(blocks[:1], tier=Tier.CPU)
        state.remove([2])
        state.remove([3], tier=Tier.CPU)
        updates.append(state.take_update() or KvUpdate(-1))
    assert fold(None, updates, 100) == state.snapshot()
    assert fold(None, updates[::-1], 100) == state.snapshot()
    before = fold(None, updates[:1], 100)
    assert fold(before, updates[1:], 100) == fold(before, updates, 100) == state.snapshot()
    assert fold(before, updates[2:], 100) is None  # one is missing
    assert fold(None, updates[1:], 100) is None


def test_a_fold_has_no_more_blocks_than_are_kept_of_an_instance() -> None:
    state, updates = KvState(), []
    for first in range(0, 100, 10):
        state.store(range(first, first + 10))
        state.store(range(first, first + 5), tier=Tier.CPU)
        state.remove([first])
        updates.append(state.take_update() or KvUpdate(-1))
    folded = fold(None, updates, 20)
    assert folded is not None
    assert folded.number == state.number
    assert folded.hash_bytes == 20 * HASH_BYTES
    assert fold(folded, [], 12) == cut(folded, 12)
    assert cut(folded, 12).hash_bytes == 12 * HASH_BYTES
    assert cut(folded, 20) == folded
    one, two, three = (pack_hashes(range(count)) for count in (1, 2, 3))
    whole = KvSnapshot(3, one, (TierChange("cpu", three), TierChange("disk", one)))
    assert cut(whole, 3) == KvSnapshot(3, one, (TierChange("cpu", two),))


def test_a_report_of_vllm_is_read_though_more_was_found_cached_than_prompts_came() -> None:
    report = LoadReport(running=1, totals=StepTotals(3, 0.1, prefill_tokens=-2984))
    assert load_message_decoder.decode(message_encoder.encode(LoadMessage("m", report))).report == report


@pytest.mark.parametrize(
    "report",
    [
        LoadReport(running=-1),
        LoadReport(queued_prefill_tokens=-(10**9)),
        LoadReport(active_blocks=1 << 60),
        LoadReport(step_ms=math.inf),
        *(LoadReport(totals=StepTotals(1, seconds)) for seconds in (math.nan, math.inf, 1e308, -1.0)),
    ],
)
def test_reports_of_less_than_nothing_and_of_infinities_are_refused(report: LoadReport) -> None:
    with pytest.raises(msgspec.ValidationError):
        load_message_decoder.decode(message_encoder.encode(LoadMessage("m", report)))
