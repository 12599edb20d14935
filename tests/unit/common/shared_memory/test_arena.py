"""Arenas: what is lent, read in place and returned, and who may open them."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from dynamo.common.options import SharedMemoryOptions
from dynamo.common.shared_memory.arena import IDLE_SWEEPS, UNTAKEN_BEATS, Arena, Region
from dynamo.common.shared_memory.files import ArenaRefused, remove_stale_files
from dynamo.common.shared_memory.layout import UNIT_BYTES, Reference
from dynamo.common.shared_memory.neighbour import BadReference, Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from dynamo.common.tensors.tensors import Buffer
from tests.support.arenas import READER_TAG, FakeReader, mappings_of, memory_folder

MIB = 2**20


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    with ExitStack() as stack:
        arena = Arena(folder, MIB)
        stack.callback(arena.close)
        yield arena


@pytest.fixture
def neighbour(folder: Path, arena: Arena) -> Iterator[Neighbour]:
    """The same arena as another process sees it."""
    with ExitStack() as stack:
        neighbour = Neighbour(folder, arena.token, READER_TAG)
        stack.callback(neighbour.close)
        yield neighbour


def lend(arena: Arena, body: bytes, reader: FakeReader | None = None) -> Reference:
    reference = arena.lend([body], len(body), reader or FakeReader())
    assert reference is not None
    return reference


# What is lent


def test_a_body_of_pieces_is_read_as_one(arena: Arena, neighbour: Neighbour) -> None:
    pieces = [b"a" * 50_000, memoryview(b"b" * 70_000), bytearray(b"c")]
    reference = arena.lend(pieces, 120_001, FakeReader())
    assert reference is not None
    assert bytes(neighbour.take(reference)) == b"".join(pieces)


@pytest.mark.parametrize("size", [1, 63, 64, UNIT_BYTES - 1, UNIT_BYTES + 1, 100_001])
def test_a_body_ends_where_the_tensor_at_its_end_is_aligned(arena: Arena, neighbour: Neighbour, size: int) -> None:
    body = random.Random(1).randbytes(size)
    view = neighbour.take(lend(arena, body))
    assert bytes(view) == body
    assert (np.frombuffer(view, np.uint8).ctypes.data + size) % 64 == 0


def test_views_are_read_only_and_lie_in_the_arena(arena: Arena, neighbour: Neighbour) -> None:
    view = neighbour.take(lend(arena, bytes(UNIT_BYTES)))
    array = np.frombuffer(view, np.float32)
    assert view.readonly and not array.flags.writeable
    assert not array.flags.owndata


def test_a_region_is_free_when_the_last_view_of_any_part_is_gone(arena: Arena, neighbour: Neighbour) -> None:
    view = neighbour.take(lend(arena, bytes(100_000)))
    array = np.frombuffer(view[1000:9000], np.uint8).reshape(80, 100)
    row = array[3, :7]
    del view, array
    arena.sweep()
    assert (len(arena), len(neighbour)) == (1, 1)
    del row
    arena.sweep()
    assert (len(arena), len(neighbour), arena.used_bytes) == (0, 0, 0)


def test_a_view_may_be_dropped_in_another_thread(arena: Arena, neighbour: Neighbour) -> None:
    views = [neighbour.take(lend(arena, bytes(UNIT_BYTES)))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    arena.sweep()
    assert len(arena) == 0


def test_a_region_that_is_read_stays_after_its_request_is_over(arena: Arena, neighbour: Neighbour) -> None:
    reference = lend(arena, b"x" * UNIT_BYTES)
    view = neighbour.take(reference)
    arena.settle(reference.generation)
    for _ in range(3):
        arena.sweep()
    assert lend(arena, b"y" * UNIT_BYTES).unit != reference.unit
    assert bytes(view) == b"x" * UNIT_BYTES


def test_a_child_of_the_reader_that_drops_its_copy_of_a_view_releases_nothing(arena: Arena, neighbour: Neighbour) -> None:
    view = neighbour.take(lend(arena, b"A" * 100))
    child = os.fork()
    if child == 0:
        del view
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    arena.sweep()
    assert arena.used_bytes > 0
    assert view.tobytes() == b"A" * 100


def test_settling_frees_at_once_what_has_been_released(arena: Arena, neighbour: Neighbour) -> None:
    reference = lend(arena, bytes(UNIT_BYTES))
    neighbour.take(reference)
    arena.settle(reference.generation)
    arena.settle(reference.generation)
    assert arena.used_bytes == 0


def test_regions_come_back_without_a_sweep_while_others_are_lent(arena: Arena, neighbour: Neighbour) -> None:
    for _ in range(1000):
        neighbour.take(lend(arena, bytes(10 * UNIT_BYTES)))
    assert len(arena) <= 2


def test_a_full_arena_lends_nothing_and_recovers(arena: Arena, neighbour: Neighbour) -> None:
    views = [neighbour.take(lend(arena, bytes(8 * UNIT_BYTES))) for _ in range(4)]
    assert arena.used_bytes == arena.capacity_bytes
    assert arena.lend([b"x"], 1, FakeReader()) is None
    views.pop()
    arena.sweep()
    assert arena.lend([b"x"], 1, FakeReader()) is not None


def test_a_body_larger_than_the_arena_is_not_lent(arena: Arena) -> None:
    assert arena.lend([bytes(2 * MIB)], 2 * MIB, FakeReader()) is None
    assert arena.used_bytes == 0


def test_without_memory_in_the_system_nothing_is_lent(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert arena.lend([b"x"], 1, FakeReader()) is None
    assert (arena.used_bytes, arena.resident_bytes) == (0, 0)


# References that do not check


@pytest.mark.parametrize(
    "wrong",
    [
        Reference(0, UNIT_BYTES, 0),
        Reference(0, UNIT_BYTES, 2),
        Reference(0, UNIT_BYTES - 1, 1),
        Reference(0, 2 * UNIT_BYTES, 1),
        Reference(1, UNIT_BYTES, 1),
        Reference(-1, UNIT_BYTES, 1),
        Reference(0, 0, 1),
        Reference(0, -5, 1),
        Reference(31, UNIT_BYTES + 1, 1),
        Reference(32, 1, 1),
        Reference(0, 2**70, 1),
        Reference(0, 1, 2**63),
    ],
)
def test_a_wrong_reference_is_refused(arena: Arena, neighbour: Neighbour, wrong: Reference) -> None:
    lend(arena, bytes(UNIT_BYTES))
    with pytest.raises(BadReference):
        neighbour.take(wrong)


def test_a_region_cannot_be_taken_twice(arena: Arena, neighbour: Neighbour) -> None:
    reference = lend(arena, bytes(UNIT_BYTES))
    view = neighbour.take(reference)
    with pytest.raises(BadReference):
        neighbour.take(reference)
    assert view.nbytes == UNIT_BYTES


def test_a_region_cannot_be_taken_again_after_it_was_released(arena: Arena, neighbour: Neighbour) -> None:
    reference = lend(arena, bytes(UNIT_BYTES))
    neighbour.take(reference)
    with pytest.raises(BadReference, match="before"):
        neighbour.take(reference)


def test_a_region_that_is_lent_to_another_process_cannot_be_taken(folder: Path, arena: Arena, neighbour: Neighbour) -> None:
    stranger = Neighbour(folder, arena.token, READER_TAG + 1)
    reference = lend(arena, bytes(UNIT_BYTES))
    with pytest.raises(BadReference, match="not lent to this process"):
        stranger.take(reference)
    assert neighbour.take(reference).nbytes == UNIT_BYTES
    stranger.close()


def test_a_late_reference_to_a_region_that_is_used_again_is_refused(arena: Arena, neighbour: Neighbour) -> None:
    reader = FakeReader()
    late = lend(arena, b"x" * UNIT_BYTES, reader)
    arena.settle(late.generation)
    reader.beat += 2
    arena.sweep()
    present = lend(arena, b"y" * UNIT_BYTES)
    assert present.unit == late.unit
    with pytest.raises(BadReference):
        neighbour.take(late)
    assert bytes(neighbour.take(present)) == b"y" * UNIT_BYTES


# Regions that are not taken


def test_what_was_not_taken_is_revoked_and_free_once_the_reader_has_moved_on(arena: Arena, neighbour: Neighbour) -> None:
    reader = FakeReader()
    reference = lend(arena, bytes(UNIT_BYTES), reader)
    arena.settle(reference.generation)
    with pytest.raises(BadReference):
        neighbour.take(reference)
    arena.sweep()
    assert len(arena) == 1, "the reader may be in the middle of taking it"
    reader.beat += 2
    arena.sweep()
    assert len(arena) == 0


def test_a_reader_that_stands_still_keeps_what_it_may_be_taking(arena: Arena) -> None:
    reference = lend(arena, bytes(UNIT_BYTES))
    arena.settle(reference.generation)
    for _ in range(1000):
        arena.sweep()
    assert len(arena) == 1


def test_a_loan_whose_message_was_lost_ends_when_the_reader_had_time_to_take_it(arena: Arena, neighbour: Neighbour) -> None:
    reader = FakeReader()
    lost, taken = (lend(arena, bytes(UNIT_BYTES), reader) for _ in range(2))
    view = neighbour.take(taken)
    for reader.beat in range(UNTAKEN_BEATS + 4):
        arena.sweep()
    with pytest.raises(BadReference):
        neighbour.take(lost)
    assert len(arena) == 1 and view.nbytes == UNIT_BYTES


def test_a_dead_reader_holds_nothing(arena: Arena, neighbour: Neighbour) -> None:
    reader = FakeReader()
    views = [neighbour.take(lend(arena, bytes(UNIT_BYTES), reader)) for _ in range(3)]
    lend(arena, bytes(UNIT_BYTES), reader)
    reader.is_alive = False
    arena.sweep()
    assert len(arena) == 0 and len(views) == 3


# Regions that are reserved


def test_a_reserved_region_is_read_from_where_it_was_published(arena: Arena, neighbour: Neighbour) -> None:
    region = arena.reserve(5 * UNIT_BYTES)
    assert region is not None and region.size == 5 * UNIT_BYTES
    arena.data(region)[4000:4010] = b"0123456789"
    reference = arena.publish(region, 4000, 10, FakeReader())
    assert arena.used_bytes == UNIT_BYTES, "what was not published is free"
    assert bytes(neighbour.take(reference)) == b"0123456789"


def test_a_reserved_region_is_free_when_neither_its_owner_nor_its_reader_uses_it(arena: Arena, neighbour: Neighbour) -> None:
    for first in ("owner", "reader"):
        region = arena.reserve(UNIT_BYTES)
        assert region is not None
        view = neighbour.take(arena.publish(region, 0, 7, FakeReader()))
        if first == "owner":
            arena.let_go(region)
            assert len(arena) == 1
            del view
            arena.sweep()
        else:
            del view
            arena.sweep()
            assert len(arena) == 1
            arena.let_go(region)
        assert (len(arena), arena.used_bytes) == (0, 0)


def test_a_reserved_region_whose_reader_died_is_free_when_its_owner_lets_go(arena: Arena) -> None:
    region, reader = arena.reserve(UNIT_BYTES), FakeReader()
    assert region is not None
    arena.publish(region, 0, 7, reader)
    reader.is_alive = False
    arena.sweep()
    assert arena.used_bytes == UNIT_BYTES
    arena.let_go(region)
    arena.sweep()
    assert (len(arena), arena.used_bytes) == (0, 0)


def test_a_region_that_was_never_published_is_free_at_once(arena: Arena) -> None:
    region = arena.reserve(10)
    assert region is not None and arena.used_bytes == UNIT_BYTES and not len(arena)
    arena.let_go(region)
    assert arena.used_bytes == 0


@pytest.mark.parametrize(("begin", "size"), [(0, UNIT_BYTES + 1), (UNIT_BYTES, 1), (-1, 1), (1, UNIT_BYTES)])
def test_only_bytes_of_the_region_can_be_published(arena: Arena, begin: int, size: int) -> None:
    region = arena.reserve(UNIT_BYTES)
    assert region is not None
    with pytest.raises(ValueError, match="cannot be lent"):
        arena.publish(region, begin, size, FakeReader())


def test_a_region_is_published_once(arena: Arena) -> None:
    region = arena.reserve(UNIT_BYTES)
    assert region is not None
    arena.publish(region, 0, 1, FakeReader())
    with pytest.raises(ValueError, match="cannot be lent"):
        arena.publish(region, 0, 1, FakeReader())


# Bodies that lie in the arena already


class Filled:
    """A region with two parts, a few bytes apart."""

    def __init__(self, arena: Arena) -> None:
        region = arena.reserve(4 * UNIT_BYTES)
        assert region is not None
        region.parts += [(4096, 50_000), (4096 + 50_004, 9_000)]
        arena.data(region)[4096:] = random.Random(2).randbytes(region.size - 4096)
        view = arena.view(region)
        self.first, self.second = (view[offset : offset + size] for offset, size in region.parts)


def test_a_body_whose_parts_lie_in_a_region_is_lent_in_place(arena: Arena, neighbour: Neighbour) -> None:
    filled = Filled(arena)
    pieces = [b"head", b"key1", filled.first, b"key2", filled.second, b"tail"]
    body, used = b"".join(pieces), arena.used_bytes
    reference = arena.lend_in_place(pieces, len(body), FakeReader())
    assert reference is not None and arena.used_bytes <= used
    view = neighbour.take(reference)
    assert bytes(view) == body
    del filled, pieces
    arena.sweep()
    assert bytes(view) == body
    del view
    arena.sweep()
    assert arena.used_bytes == 0


@pytest.mark.parametrize(
    "pieces",
    [
        lambda filled: [b"head", filled.first],
        lambda filled: [b"head", filled.second],
        lambda filled: [b"head", filled.second, b"key2", filled.first],
        lambda filled: [b"head", filled.first, b"longer", filled.second],
        lambda filled: [b"head", filled.first, filled.second],
        lambda filled: [b"head", filled.first[:-1], b"key2+", filled.second],
        lambda filled: [bytes(4097), filled.first, b"key2", filled.second],
        lambda filled: [b"head", filled.first, b"key2", filled.second, bytes(3 * UNIT_BYTES)],
        lambda filled: [b"head", bytes(filled.first), b"key2", bytes(filled.second)],
    ],
)
def test_no_other_body_is_lent_in_place_or_changes_its_parts(arena: Arena, pieces: Callable[[Filled], list[Buffer]]) -> None:
    filled = Filled(arena)
    before = bytes(filled.first), bytes(filled.second)
    body = pieces(filled)
    assert arena.lend_in_place(body, sum(map(len, body)), FakeReader()) is None
    assert (bytes(filled.first), bytes(filled.second)) == before
    del filled, body
    arena.sweep()
    assert arena.used_bytes == 0


def test_a_body_is_lent_in_place_once(arena: Arena) -> None:
    filled = Filled(arena)
    pieces = [filled.first, b"key2", filled.second]
    assert arena.lend_in_place(pieces, 59_004, FakeReader()) is not None
    assert arena.lend_in_place(pieces, 59_004, FakeReader()) is None


@pytest.fixture
def neighbours(folder: Path) -> Iterator[tuple[SharedMemory, Neighbour, SharedMemory]]:
    """Two processes' shared memory; the first knows the other as a neighbour."""
    with ExitStack() as stack:
        ours, theirs = SharedMemory(folder, 4 * MIB), SharedMemory(folder, MIB)
        stack.callback(ours.close)
        stack.callback(theirs.close)
        reader = ours.neighbour(theirs.token)
        assert reader is not None
        yield ours, reader, theirs


def receive(ours: SharedMemory, body: bytes) -> memoryview:
    room = ours.room(len(body))
    assert room is not None
    room.view[:] = body
    return room.finish()


def test_a_body_that_was_received_into_a_room_is_lent_without_a_copy(
    neighbours: tuple[SharedMemory, Neighbour, SharedMemory],
) -> None:
    ours, reader, theirs = neighbours
    body = random.Random(1).randbytes(300_000)
    view = receive(ours, body)
    used = ours.used_bytes
    reference = ours.lend(view, len(view), reader)
    assert reference is not None and ours.used_bytes == used
    owner = theirs.neighbour(ours.token)
    assert owner is not None
    taken = theirs.take(owner, reference)
    assert taken is not None and bytes(taken) == body
    del taken
    ours.sweep()
    assert bytes(view) == body, "the owner may still need it for a retry"
    again = ours.lend(view, len(view), reader)
    assert again is not None and again.unit != reference.unit
    ours.arena.settle(again.generation)
    del view
    for _ in range(3):
        theirs.sweep()
        ours.sweep()
    assert ours.used_bytes == 0


def test_a_room_that_is_dropped_or_whose_views_are_gone_is_free(
    neighbours: tuple[SharedMemory, Neighbour, SharedMemory],
) -> None:
    ours, _, _ = neighbours
    room = ours.room(300_000)
    assert room is not None
    room.drop()
    assert ours.used_bytes == 0
    view = receive(ours, bytes(300_000))
    assert ours.used_bytes > 0
    part = view[10:20]
    del view
    ours.sweep()
    assert ours.used_bytes > 0
    del part
    ours.sweep()
    assert ours.used_bytes == 0


@pytest.mark.parametrize("size", [1, 256 * 1024 - 1, 17 * MIB])
def test_there_is_no_room_for_small_and_very_large_bodies(
    neighbours: tuple[SharedMemory, Neighbour, SharedMemory], size: int
) -> None:
    assert neighbours[0].room(size) is None


def test_a_body_that_would_hold_up_the_event_loop_while_it_is_copied_travels_in_messages(folder: Path) -> None:
    ours, theirs = SharedMemory(folder, 128 * MIB), SharedMemory(folder, MIB)
    reader = ours.neighbour(theirs.token)
    assert reader is not None
    assert ours.lend(bytes(64 * MIB + 1), 64 * MIB + 1, reader) is None
    assert (ours.fallbacks, ours.used_bytes) == ({"large": 1}, 0)
    ours.close()
    theirs.close()


def test_there_is_no_room_without_neighbours_or_beyond_half_of_the_arena(
    folder: Path, neighbours: tuple[SharedMemory, Neighbour, SharedMemory]
) -> None:
    ours, _, _ = neighbours
    assert ours.room(MIB) is not None
    assert ours.room(MIB) is not None
    assert ours.room(MIB) is None
    alone = SharedMemory(folder, 4 * MIB)
    assert alone.room(MIB) is None
    alone.close()


class LendingMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: views never change, and everything comes back."""

    lent = Bundle("lent")
    reserved = Bundle("reserved")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = self.stack.enter_context(memory_folder())
        self.arena = Arena(folder, MIB)
        self.stack.callback(self.arena.close)
        self.neighbour = Neighbour(folder, self.arena.token, READER_TAG)
        self.stack.callback(self.neighbour.close)
        self.reader = FakeReader()
        self.random = random.Random(1)
        self.content: dict[int, bytes] = {}
        self.held: dict[int, memoryview] = {}
        self.held_by_owner: dict[int, Region] = {}
        self.unpublished: list[Region] = []

    @rule(target=lent, size=st.integers(1, 12 * UNIT_BYTES))
    def lend(self, size: int) -> object:
        body = self.random.randbytes(size)
        reference = self.arena.lend([body], size, self.reader)
        if reference is None:
            return multiple()
        self.content[reference.generation] = body
        return reference

    @rule(target=reserved, size=st.integers(1, 12 * UNIT_BYTES))
    def reserve(self, size: int) -> object:
        region = self.arena.reserve(size)
        if region is None:
            return multiple()
        self.arena.data(region)[:] = self.random.randbytes(region.size)
        self.unpublished.append(region)
        return region

    @rule(target=lent, region=consumes(reserved), begin=st.integers(0, UNIT_BYTES - 1), less=st.integers(0, 3 * UNIT_BYTES))
    def publish(self, region: Region, begin: int, less: int) -> object:
        size = max(1, region.size - begin - less)
        self.unpublished.remove(region)
        body = bytes(self.arena.data(region)[begin : begin + size])
        reference = self.arena.publish(region, begin, size, self.reader)
        self.content[reference.generation] = body
        self.held_by_owner[reference.generation] = region
        return reference

    @rule(region=consumes(reserved))
    def let_go_unpublished(self, region: Region) -> None:
        self.unpublished.remove(region)
        self.arena.let_go(region)

    @precondition(lambda self: self.held_by_owner)
    @rule()
    def let_go_of_the_oldest(self) -> None:
        self.arena.let_go(self.held_by_owner.pop(next(iter(self.held_by_owner))))

    @rule(target=views, reference=consumes(lent))
    def take(self, reference: Reference) -> object:
        try:
            self.held[reference.generation] = self.neighbour.take(reference)
        except BadReference:
            return multiple()
        return reference.generation

    @rule(generation=consumes(views))
    def drop(self, generation: int) -> None:
        del self.held[generation]

    @rule(reference=lent)
    def settle_before_it_is_taken(self, reference: Reference) -> None:
        self.arena.settle(reference.generation)

    @rule(generation=views)
    def settle_while_it_is_read(self, generation: int) -> None:
        self.arena.settle(generation)

    @rule(beats=st.integers(0, 3))
    def sweep(self, beats: int) -> None:
        self.reader.beat += beats
        self.arena.sweep()

    @invariant()
    def views_hold_what_was_lent(self) -> None:
        for generation, view in self.held.items():
            assert view == self.content[generation]

    @invariant()
    def what_the_owner_holds_does_not_change(self) -> None:
        for generation, region in self.held_by_owner.items():
            assert self.content[generation] in bytes(self.arena.data(region))

    def teardown(self) -> None:
        self.held.clear()
        for region in (*self.held_by_owner.values(), *self.unpublished):
            self.arena.let_go(region)
        for _ in range(3):
            self.reader.beat += UNTAKEN_BEATS
            self.arena.sweep()
        assert (len(self.arena), len(self.neighbour), self.arena.used_bytes) == (0, 0, 0)
        self.stack.close()


TestLending = LendingMachine.TestCase
TestLending.settings = settings(max_examples=40, deadline=None)


# Memory


def test_memory_is_taken_by_use_only_and_given_back_when_idle(folder: Path, arena: Arena, neighbour: Neighbour) -> None:
    file = folder / arena.token.partition(":")[0]
    empty = file.stat().st_blocks
    views = [neighbour.take(lend(arena, b"x" * 8 * UNIT_BYTES)) for _ in range(3)]
    assert file.stat().st_blocks * 512 >= 24 * UNIT_BYTES
    kept = views.pop()
    views.clear()
    for _ in range(2 * IDLE_SWEEPS):
        arena.sweep()
    assert arena.resident_bytes == 8 * UNIT_BYTES
    assert (file.stat().st_blocks - empty) * 512 == 8 * UNIT_BYTES
    assert bytes(kept) == b"x" * 8 * UNIT_BYTES
    again = neighbour.take(lend(arena, b"y" * 16 * UNIT_BYTES))
    assert bytes(again) == b"y" * 16 * UNIT_BYTES


def test_memory_in_regular_use_is_kept(arena: Arena, neighbour: Neighbour) -> None:
    for _ in range(5 * IDLE_SWEEPS):
        neighbour.take(lend(arena, bytes(4 * UNIT_BYTES)))
        arena.sweep()
    assert arena.resident_bytes >= 4 * UNIT_BYTES


def test_nothing_stays_mapped_of_an_owner_that_is_gone(folder: Path) -> None:
    arena = Arena(folder, MIB)
    inode = (folder / arena.token.partition(":")[0]).stat().st_ino
    neighbour = Neighbour(folder, arena.token, READER_TAG)
    view = neighbour.take(lend(arena, b"x" * 1000))
    arena.close()
    neighbour.close()
    del arena, neighbour
    gc.collect()
    assert bytes(view) == b"x" * 1000 and mappings_of(inode) == 1
    del view
    assert mappings_of(inode) == 0


def test_a_closed_neighbour_that_is_still_referenced_has_nothing_mapped(folder: Path) -> None:
    arena = Arena(folder, MIB)
    inode = (folder / arena.token.partition(":")[0]).stat().st_ino
    unread, read = (Neighbour(folder, arena.token, READER_TAG) for _ in range(2))
    view = read.take(lend(arena, b"x" * 1000))
    late = lend(arena, b"y" * 1000)
    arena.close()
    del arena
    for neighbour in (unread, read):
        neighbour.close()
        with pytest.raises(BadReference, match="closed"):
            neighbour.take(late)
        assert neighbour.beat == 0
    assert bytes(view) == b"x" * 1000
    del view
    assert mappings_of(inode) == 0


# Who may open an arena


def test_an_arena_is_private_to_its_user(folder: Path, arena: Arena) -> None:
    status = (folder / arena.token.partition(":")[0]).stat()
    assert status.st_mode & 0o777 == 0o600 and status.st_uid == os.geteuid()


def test_its_file_is_gone_when_it_is_closed(folder: Path) -> None:
    Arena(folder, MIB).close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o604])
def test_an_arena_that_others_may_open_is_refused(folder: Path, arena: Arena, mode: int) -> None:
    (folder / arena.token.partition(":")[0]).chmod(mode)
    with pytest.raises(ArenaRefused, match="of this user alone"):
        Neighbour(folder, arena.token, READER_TAG)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_arena_of_another_user_is_refused(folder: Path, arena: Arena) -> None:
    os.chown(folder / arena.token.partition(":")[0], 12345, 12345)
    with pytest.raises(ArenaRefused, match="of this user alone"):
        Neighbour(folder, arena.token, READER_TAG)


def test_a_symbolic_link_is_not_followed(folder: Path, arena: Arena) -> None:
    name = arena.token.partition(":")[0]
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(folder / "elsewhere")
    with pytest.raises(ArenaRefused, match="cannot be opened"):
        Neighbour(folder, arena.token, READER_TAG)


def test_a_pipe_in_place_of_an_arena_is_refused_without_blocking(folder: Path, arena: Arena) -> None:
    path = folder / arena.token.partition(":")[0]
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ArenaRefused):
        Neighbour(folder, arena.token, READER_TAG)
    assert remove_stale_files(folder) == 0


@pytest.mark.parametrize(
    "token", ["", "x", "../../etc/passwd", "dynamo-arena-1-0123456789abcdef:", "dynamo-arena-1/../2-0123456789abcdef:" + "0" * 32]
)
def test_what_is_no_token_opens_nothing(folder: Path, token: str) -> None:
    with pytest.raises(ArenaRefused, match="no token"):
        Neighbour(folder, token, READER_TAG)


def test_an_arena_without_the_nonce_of_the_token_is_refused(folder: Path, arena: Arena) -> None:
    with pytest.raises(ArenaRefused, match="nonce"):
        Neighbour(folder, arena.token.partition(":")[0] + ":" + "0" * 32, READER_TAG)


def test_an_arena_of_another_kernel_is_refused(folder: Path, arena: Arena) -> None:
    with (folder / arena.token.partition(":")[0]).open("r+b") as file:
        file.seek(16)
        file.write(b"0")
        file.write(b"1")
    with pytest.raises(ArenaRefused, match="another kernel"):
        Neighbour(folder, arena.token, READER_TAG)


def test_an_arena_of_another_size_than_it_claims_is_refused(folder: Path, arena: Arena) -> None:
    os.truncate(folder / arena.token.partition(":")[0], arena.layout.file_bytes - 1)
    with pytest.raises(ArenaRefused, match="bytes where"):
        Neighbour(folder, arena.token, READER_TAG)


def test_a_file_that_is_no_arena_is_refused(folder: Path, arena: Arena) -> None:
    path = folder / arena.token.partition(":")[0]
    path.unlink()
    path.touch(0o600)
    with pytest.raises(ArenaRefused, match="too short"):
        Neighbour(folder, arena.token, READER_TAG)


def test_programs_that_are_started_inherit_no_descriptor_of_an_arena(arena: Arena, neighbour: Neighbour) -> None:
    program = "import os; print(*(os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')))"
    output = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, close_fds=False, check=True)
    assert "arena" not in output.stdout


def test_a_forked_child_does_not_keep_the_arena_of_its_dead_parent_alive(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    tokens, children = context.SimpleQueue(), context.SimpleQueue()

    def parent() -> None:
        arena = Arena(folder, MIB)
        child = context.Process(target=signal.pause)
        child.start()
        children.put(child.pid)
        tokens.put(arena.token)
        signal.pause()

    process = context.Process(target=parent)
    process.start()
    neighbour = Neighbour(folder, tokens.get(), READER_TAG)
    assert neighbour.is_alive
    process.kill()
    process.join()
    assert not neighbour.is_alive
    assert remove_stale_files(folder) == 1
    os.kill(children.get(), signal.SIGKILL)
    neighbour.close()


def test_a_forked_child_does_not_remove_the_arena_of_its_parent(folder: Path, arena: Arena) -> None:
    child = multiprocessing.get_context("fork").Process(target=arena.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert Neighbour(folder, arena.token, READER_TAG).is_alive


async def test_an_arena_that_cannot_be_mapped_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    async with open_shared_memory(SharedMemoryOptions(dir=folder)) as memory:
        assert memory is None
    assert not list(folder.iterdir())


# Stale files


def test_stale_files_are_removed_and_live_ones_are_not(folder: Path, arena: Arena) -> None:
    live = arena.token.partition(":")[0]
    stale = folder / "dynamo-arena-1-0123456789abcdef"
    foreign = folder / "dynamo-arena-1-not-ours"
    for path in (stale, foreign):
        path.touch(0o600)
    assert remove_stale_files(folder) == 1
    assert {path.name for path in folder.iterdir()} == {live, foreign.name}


def test_a_link_with_the_name_of_an_arena_is_left_alone(folder: Path) -> None:
    target = folder / "precious"
    target.touch(0o600)
    (folder / "dynamo-arena-1-0123456789abcdef").symlink_to(target)
    assert remove_stale_files(folder) == 0
    assert target.exists()


# The process's view


def test_a_neighbour_is_opened_once_and_forgotten_when_it_is_gone(folder: Path) -> None:
    ours, theirs = SharedMemory(folder, MIB), SharedMemory(folder, MIB)
    neighbour = ours.neighbour(theirs.token)
    assert neighbour is not None and ours.neighbour(theirs.token) is neighbour
    lent = ours.lend([memoryview(b"x")], 1, neighbour)
    assert lent is not None and ours.arena.used_bytes
    theirs.close()
    ours.sweep()
    assert ours.arena.used_bytes == 0
    assert ours.neighbour(theirs.token) is None
    ours.close()


def test_a_peer_that_cannot_be_opened_is_tried_once_and_counted(folder: Path) -> None:
    with memory_folder() as elsewhere:
        ours, theirs = SharedMemory(folder, MIB), SharedMemory(elsewhere, MIB)
        assert ours.neighbour(theirs.token) is None
        assert ours.neighbour(theirs.token) is None
        assert ours.fallbacks == {"unreachable": 1}
        ours.close()
        theirs.close()


def test_what_is_no_token_is_neither_logged_nor_remembered(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ours = SharedMemory(folder, MIB)
    for _ in range(2):
        assert ours.neighbour("x" * 1_000_000) is None
    assert ours.fallbacks == {"unreachable": 2}
    assert not caplog.records
    ours.close()


def test_bytes_and_fallbacks_are_counted(folder: Path) -> None:
    ours, theirs = SharedMemory(folder, MIB), SharedMemory(folder, MIB)
    reader, owner = ours.neighbour(theirs.token), theirs.neighbour(ours.token)
    assert reader is not None and owner is not None
    reference = ours.lend([memoryview(bytes(1000))], 1000, reader)
    assert reference is not None
    theirs.take(owner, reference)
    assert ours.lend([memoryview(bytes(2 * MIB))], 2 * MIB, reader) is None
    assert theirs.take(owner, Reference(0, 1, 99)) is None
    assert (ours.bytes, ours.fallbacks) == ({"lent": 1000}, {"full": 1})
    assert (theirs.bytes, theirs.fallbacks) == ({"taken": 1000}, {"refused": 1})
    ours.close()
    theirs.close()


async def test_without_a_usable_folder_there_is_no_shared_memory(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_shared_memory(SharedMemoryOptions(dir=folder / "missing")) as memory:
        assert memory is None
    assert "bodies travel in messages" in caplog.text


async def test_a_size_of_zero_means_no_shared_memory(folder: Path) -> None:
    async with open_shared_memory(SharedMemoryOptions(dir=folder, size=0)) as memory:
        assert memory is None
        assert not list(folder.iterdir())


async def test_opening_removes_what_dead_processes_left(folder: Path) -> None:
    (folder / "dynamo-arena-1-0123456789abcdef").touch(0o600)
    async with open_shared_memory(SharedMemoryOptions(dir=folder)) as memory:
        assert memory is not None
        assert [path.name for path in folder.iterdir()] == [memory.token.partition(":")[0]]
    assert not list(folder.iterdir())
