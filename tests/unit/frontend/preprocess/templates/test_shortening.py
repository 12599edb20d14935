"""Conversations that are shortened until they fit into a model's context."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.preprocess.templates.shortening import Message, Shortenings, fitting
from dynamo.frontend.preprocess.text import ContextExceeded

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(roles: str) -> list[dict[str, Any]]:
    """Return messages with the roles that begin with these letters."""
    names = {name[0]: name for name in ROLES}
    return [{"role": names[letter], "content": str(index)} for index, letter in enumerate(roles)]


def letters(messages: Sequence[Message]) -> str:
    return "".join(message["role"][0] for message in messages)


@pytest.mark.parametrize(
    ("whole", "choices"),
    [
        ("u", ["u"]),
        ("suau", ["suau", "sau", "su"]),
        ("sduattu", ["sduattu", "sdattu", "sdu"]),
        ("uatt", ["uatt", "att"]),
        ("tu", ["tu", "u"]),
        ("s", ["s"]),
        ("uas", ["uas", "as", "s"]),
        ("", [""]),
    ],
)
def test_instructions_stay_and_no_result_of_a_tool_comes_first(whole: str, choices: list[str]) -> None:
    assert [letters(messages) for messages in Shortenings(conversation(whole))] == choices


@given(st.text("suat", min_size=1, max_size=20), st.integers(0, 25))
async def test_as_much_is_left_as_fits(roles: str, room: int) -> None:
    attempts = 0

    async def attempt(messages: Sequence[Message]) -> int:
        nonlocal attempts
        attempts += 1
        if len(messages) > room:
            raise ContextExceeded("too long")
        return len(messages)

    choices = Shortenings(conversation(roles))
    best = max((len(choice) for choice in choices if len(choice) <= room), default=None)
    if best is None:
        with pytest.raises(ContextExceeded):
            await fitting(conversation(roles), attempt)
    else:
        assert await fitting(conversation(roles), attempt) == best
    assert attempts <= 2 + len(choices).bit_length()


async def test_one_shortened_conversation_is_held_at_a_time() -> None:
    messages = conversation("ua" * 2000)

    async def attempt(messages: Sequence[Message]) -> int:
        if len(messages) > 1000:
            raise ContextExceeded("too long")
        return len(messages)

    tracemalloc.start()
    try:
        assert await fitting(messages, attempt) == 1000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * len(messages)
