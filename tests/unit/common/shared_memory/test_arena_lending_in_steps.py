"""Large bodies are copied into shared memory in steps, so that the event loop goes on between them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from dynamo.common.shared_memory.arena import Arena
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import Neighbour
from dynamo.common.tensors.tensors import Buffer

MIB = 1 << 20
BODY = bytes(range(256)) * (17 * MIB // 256)


class FakeReader:
    tag, beat, is_alive = 1, 0, True


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path, 32 * MIB)
    yield arena
    arena.close()


def finish(steps: Generator[None, None, Reference | None]) -> tuple[int, Reference | None]:
    for number in range(1000):
        try:
            next(steps)
        except StopIteration as end:
            return number, end.value
    raise AssertionError("steps end")


@pytest.mark.parametrize(
    "pieces", [[BODY], [b"head", BODY[:-5], b"", b"t"], [BODY[begin : begin + 3000] for begin in range(0, 30_000, 3000)]]
)
def test_a_body_that_is_copied_in_steps_is_read_as_a_whole(tmp_path: Path, arena: Arena, pieces: list[Buffer]) -> None:
    size = sum(map(len, pieces))
    steps, reference = finish(arena.lend_in_steps(pieces, size, FakeReader()))
    assert reference is not None and reference.size == size
    assert steps == size // (4 * MIB)
    neighbour = Neighbour(tmp_path, arena.token, FakeReader.tag)
    assert bytes(neighbour.take(reference)) == b"".join(pieces)
    neighbour.close()


def test_a_body_whose_copy_is_given_up_leaves_no_memory_in_use(arena: Arena) -> None:
    steps = arena.lend_in_steps([BODY], len(BODY), FakeReader())
    next(steps)
    assert arena.used_bytes >= len(BODY)
    steps.close()
    assert (arena.used_bytes, len(arena)) == (0, 0)
    _, reference = finish(arena.lend_in_steps([BODY], len(BODY), FakeReader()))
    assert reference is not None, "what was prepared, and what was not, can be used by others"


def test_a_body_for_which_there_is_no_room_is_not_copied(arena: Arena) -> None:
    first = arena.lend_in_steps([BODY], len(BODY), FakeReader())
    next(first)
    assert finish(arena.lend_in_steps([BODY], len(BODY), FakeReader())) == (0, None)
