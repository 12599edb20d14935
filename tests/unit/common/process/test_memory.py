"""Freed memory is kept for a while, then given back."""

from __future__ import annotations

import platform

import pytest

from dynamo.common.process.memory import Trimmer, give_back, keep_freed_memory
from tests.support.memory import resident_bytes

MIB = 2**20
IS_GLIBC = platform.libc_ver()[0] == "glibc"


def test_freed_memory_is_kept_on_glibc() -> None:
    assert keep_freed_memory() is IS_GLIBC


@pytest.mark.skipif(not IS_GLIBC, reason="other allocators decide for themselves")
def test_memory_below_a_live_block_is_given_back() -> None:
    keep_freed_memory()
    give_back()
    before = resident_bytes()
    blocks = [b"x" * (256 * 1024) for _ in range(512)]
    last = blocks[-1]
    del blocks
    kept = resident_bytes() - before
    give_back()
    assert kept > 100 * MIB
    assert resident_bytes() - before < 16 * MIB
    assert last


class Process:
    """A process that has worked for `cpu_s`."""

    def __init__(self) -> None:
        self.cpu_s, self.trims = 1.0, 0

    def trim(self) -> None:
        self.trims += 1


async def test_a_process_that_worked_gives_memory_back_and_an_idle_one_is_left_alone() -> None:
    process = Process()
    trimmer = Trimmer(lambda: process.cpu_s, process.trim)
    await trimmer.look()
    await trimmer.look()
    assert process.trims == 1
    process.cpu_s += 0.06
    await trimmer.look()
    assert process.trims == 2
