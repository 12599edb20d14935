from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.hashes import Buffer, sequence_hashes
from dynamo.frontend.router.cache import hashing
from dynamo.frontend.router.cache.hashing import LONG_PROMPT_BYTES, RecentPrompts

SIZE = 4


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has hashed."""
    sizes: list[int] = []

    def counting(tokens: Buffer, block_size: int, parent: int | None = None) -> list[int]:
        sizes.append(len(tokens))
        return sequence_hashes(tokens, block_size, parent)

    monkeypatch.setattr(hashing, "sequence_hashes", counting)
    return sizes


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([[1] * 4, [2] * 4, [1, 1, 1, 2]]), max_size=30),  # few kinds of blocks: many share some
            st.lists(st.integers(0, 3), max_size=5),
            st.sampled_from([None, 7]),
            st.sampled_from([4, 8]),
        ),
        max_size=20,
    )
)
def test_hashes_are_those_of_the_prompt_alone_whatever_came_before(
    requested: list[tuple[list[list[int]], list[int], int | None, int]],
) -> None:
    recent = RecentPrompts(most=3)
    for blocks, rest, parent, size in requested:
        prompt = pack_tokens([token for block in blocks for token in block] + rest)
        assert recent.hashes(prompt, size, parent)[0] == sequence_hashes(prompt, size, parent)


def test_the_next_turn_of_a_conversation_is_hashed_from_where_it_goes_on(hashed: list[int]) -> None:
    recent = RecentPrompts()
    turn = pack_tokens(range(100))
    recent.hashes(turn, SIZE)
    following = turn + pack_tokens(range(60))
    assert recent.hashes(following, SIZE)[0] == sequence_hashes(following, SIZE)
    assert hashed == [len(turn), len(following) - len(turn)]


def test_the_prompts_used_least_lately_are_forgotten(hashed: list[int]) -> None:
    recent = RecentPrompts(most=2)
    first, second, third = (pack_tokens(range(start, start + 40)) for start in (0, 1000, 2000))
    for prompt in (first, second, first, third):
        recent.hashes(prompt, SIZE)
    hashed.clear()
    recent.hashes(first, SIZE)
    recent.hashes(second, SIZE)
    assert hashed == [0, len(second)]


def test_prompts_that_are_hashed_in_steps_are_not_kept(hashed: list[int]) -> None:
    recent = RecentPrompts()
    for _ in range(2):
        recent.hashes(bytes(LONG_PROMPT_BYTES), SIZE)
    assert hashed == [LONG_PROMPT_BYTES, LONG_PROMPT_BYTES]
