"""Blocks that a store has lost without a word."""

from __future__ import annotations

from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.doubts import DOUBTED_S, Doubts
from tests.support.memory import kept_objects

A, B = InstanceId(1), InstanceId(2)
BLOCKS = [11, 12, 13, 14]


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_doubted_block_ends_what_is_believed() -> None:
    doubts = Doubts(Clock())
    doubts.add(A, Tier.DISK, 13)
    assert doubts.believed(A, Tier.DISK, BLOCKS, 0, 4) == 2
    assert doubts.believed(A, Tier.DISK, BLOCKS, 3, 4) == 4
    assert doubts.believed(B, Tier.DISK, BLOCKS, 0, 4) == 4, "another instance has a disk of its own"


def test_a_doubt_about_the_shared_store_is_one_for_all() -> None:
    doubts = Doubts(Clock())
    doubts.add(A, Tier.SHARED, 11)
    assert doubts.believed(B, Tier.SHARED, BLOCKS, 0, 4) == 0
    doubts.remove_instance(A)
    assert doubts.believed(B, Tier.SHARED, BLOCKS, 0, 4) == 0
    doubts.settle(B, Tier.SHARED, [11])
    assert doubts.believed(A, Tier.SHARED, BLOCKS, 0, 4) == 4


def test_doubts_end_after_a_while_and_with_their_instance() -> None:
    clock = Clock()
    doubts = Doubts(clock)
    doubts.add(A, Tier.DISK, 11)
    clock.now += DOUBTED_S
    assert doubts.believed(A, Tier.DISK, BLOCKS, 0, 4) == 4
    doubts.add(A, Tier.DISK, 12)
    doubts.remove_instance(A)
    assert len(doubts) == 0


def test_doubts_are_bounded() -> None:
    doubts = Doubts(Clock())
    for block in range(70_000):
        doubts.add(A, Tier.DISK, block)
    assert len(doubts) == 65_536
    assert doubts.believed(A, Tier.DISK, [69_999], 0, 1) == 0
    assert kept_objects(doubts) < 400_000
