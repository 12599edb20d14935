"""Drop the beginning of a conversation that is too long for a model's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from dynamo.frontend.preprocess.text import ContextExceeded

Message = Mapping[str, Any]
T = TypeVar("T")

_INSTRUCTIONS = frozenset({"system", "developer"})


class Shortenings:
    """What can be left of a conversation, from all of it to its last turn. Each is made when it is read.

    Instructions at the beginning stay. The rest begins with no result of a tool, whose call would be missing.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        is_instruction = (message["role"] in _INSTRUCTIONS for message in messages)
        self._first = next((index for index, is_one in enumerate(is_instruction) if not is_one), len(messages))
        self._messages = messages
        self._begins = [
            index for index in range(self._first, len(messages)) if index == self._first or messages[index]["role"] != "tool"
        ] or [self._first]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, position: int) -> list[Message]:
        return [*self._messages[: self._first], *self._messages[self._begins[position] :]]


async def fitting(messages: Sequence[Message], attempt: Callable[[Sequence[Message]], Awaitable[T]]) -> T:
    """Return the result of `attempt` with as many of the last messages as it takes. Raises ContextExceeded if it takes none.

    `attempt` raises ContextExceeded for too many; it is called about as often as the binary logarithm of their number.
    """
    choices = Shortenings(messages)
    try:
        return await attempt(choices[0])
    except ContextExceeded:
        if len(choices) == 1:
            raise
    result = await attempt(choices[-1])
    too_long, fits = 0, len(choices) - 1
    while fits - too_long > 1:
        middle = (too_long + fits) // 2
        try:
            result, fits = await attempt(choices[middle]), middle
        except ContextExceeded:
            too_long = middle
    return result
