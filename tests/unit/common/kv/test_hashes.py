"""Hashes that every process must compute alike."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.hashes import (
    block_hash,
    chain,
    pack_hashes,
    sequence_hashes,
    space_hash,
    unpack_hashes,
)

FIRST, SECOND, CHAINED = 4117275816416024698, 6081346995852963768, 5947898228081096063


def test_blocks_hash_to_the_published_check_values() -> None:
    assert block_hash(pack_tokens([11, 22, 33, 44])) == FIRST
    assert block_hash(pack_tokens([55, 66, 77, 88])) == SECOND
    assert chain(FIRST, SECOND) == CHAINED
    assert sequence_hashes(pack_tokens([11, 22, 33, 44, 55, 66, 77, 88]), 4) == [FIRST, CHAINED]


def test_a_block_that_is_not_full_has_no_hash() -> None:
    assert sequence_hashes(pack_tokens([11, 22, 33]), 4) == []
    assert sequence_hashes(pack_tokens([11, 22, 33, 44, 55]), 4) == [FIRST]
    assert sequence_hashes(b"", 4) == []
    assert sequence_hashes(b"", 4, parent=7) == []


def test_a_sequence_can_be_hashed_in_parts() -> None:
    tokens = list(range(100))
    whole = sequence_hashes(pack_tokens(tokens), 8)
    assert whole[:5] + sequence_hashes(pack_tokens(tokens[40:]), 8, parent=whole[4]) == whole


def test_adapters_and_salts_share_nothing_with_each_other() -> None:
    spaces = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a")]
    tokens = pack_tokens(range(32))
    seen = [hashes for adapter, salt in spaces for hashes in sequence_hashes(tokens, 8, space_hash(adapter, salt))]
    assert len(set(seen)) == len(seen)
    assert space_hash() is None


def test_any_buffer_is_hashed_alike() -> None:
    tokens = pack_tokens(range(64))
    expected = sequence_hashes(tokens, 16)
    assert sequence_hashes(bytearray(tokens), 16) == expected
    assert sequence_hashes(memoryview(tokens).cast("I"), 16) == expected


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        sequence_hashes(pack_tokens([1]), 0)


def test_a_prompt_of_128k_tokens_is_hashed_with_four_calls_for_each_block() -> None:
    tokens = pack_tokens(range(128 * 1024))
    calls = 0

    def count(frame: FrameType, event: str, called: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        hashes = sequence_hashes(tokens, 16)
    finally:
        sys.setprofile(None)
    assert len(hashes) == 8192
    assert calls <= 4 * 8192 + 100, "two hashes, a pair and an append"


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_travel_unchanged(hashes: list[int]) -> None:
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    assert len(pack_hashes(hashes)) == 8 * len(hashes)


def test_a_cut_off_list_of_hashes_is_refused() -> None:
    with pytest.raises(ValueError):
        unpack_hashes(b"1234567")


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_equal_sequence_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    a, b = sequence_hashes(pack_tokens(left), 2), sequence_hashes(pack_tokens(right), 2)
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x == y) == (left[: 2 * at + 2] == right[: 2 * at + 2])
