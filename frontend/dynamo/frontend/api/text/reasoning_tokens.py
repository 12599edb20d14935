"""Count how many tokens of a response are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.preprocess.parsers import Content, Part, Reasoning


class ReasoningTokenCounter:
    """Counts the reasoning tokens of one choice, including the tags around the reasoning."""

    __slots__ = ("_certain", "_is_reasoning", "_pending")

    def __init__(self) -> None:
        self._certain = 0
        self._pending = 0
        """Tokens without a part yet: the parser holds their text back, or they are a tag."""
        self._is_reasoning = False

    @property
    def count(self) -> int:
        return self._certain + (self._pending if self._is_reasoning else 0)

    def add_content(self) -> None:
        """Do as `add` does for tokens that became content alone."""
        if self._is_reasoning:
            self._certain += self._pending
            self._is_reasoning = False
        self._pending = 0

    def add(self, parts: Sequence[Part], tokens: int) -> None:
        """Count `tokens` more tokens, which the parser turned into `parts`.

        If `parts` mix reasoning with other text, the tokens are split in proportion to the characters.
        """
        if not parts:
            self._pending += tokens
            return
        reasoning = sum(len(part.text) for part in parts if isinstance(part, Reasoning))
        if reasoning:
            others = sum(map(_size, parts)) - reasoning
            self._certain += self._pending + round(tokens * reasoning / (reasoning + others))
        elif self._is_reasoning:
            self._certain += self._pending
        self._pending = 0
        self._is_reasoning = isinstance(parts[-1], Reasoning)


def _size(part: Part) -> int:
    return len(part.text) if isinstance(part, Content | Reasoning) else len(part.arguments)
