"""Drop the beginning of a conversation that is too long for a model's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from dynamo.frontend.preprocess.text import ContextExceeded

Message = Mapping[str, Any]
T = TypeVar("T")

_INSTRUCTIONS = frozenset({"system", "developer"})


def shortenings(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Return what can be left of a conversation, from all of it to its last turn.

    Instructions at the beginning stay. The rest begins with no result of a tool, whose call would be missing.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS), len(messages))
    begins = [index for index in range(first, len(messages)) if index == first or messages[index]["role"] != "tool"]
    return [[*messages[:first], *messages[index:]] for index in begins] or [messages]


async def fitting(messages: Sequence[Message], attempt: Callable[[Sequence[Message]], Awaitable[T]]) -> T:
    """Return the result of `attempt` with as many of the last messages as it takes. Raises ContextExceeded if it takes none.

    `attempt` raises ContextExceeded for too many; it is called about as often as the binary logarithm of their number.
    """
    choices = shortenings(messages)
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
