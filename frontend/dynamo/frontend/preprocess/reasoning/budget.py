"""How many tokens a response may spend on reasoning, and when it has spent them.

Reasoning is at the beginning of a response, so its length is that of the response so far. Tags are searched for in the text of
the last tokens, since a tag is one token in some vocabularies and several in others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.frontend.preprocess.parsers import ReasoningTags
from dynamo.frontend.preprocess.text import ReasoningLimit

_TAG_TOKENS = 64
"""More than any tag has, with the white space before it."""


class ReasoningBudget:
    """Limits the tokens of reasoning of one completion choice."""

    def __init__(self, limit: ReasoningLimit, prompt_end: str, decode: Callable[[list[int]], str]) -> None:
        """`prompt_end` is the end of the prompt as text; it may hold the opening tag."""
        self._max_tokens = limit.max_tokens
        self._tags = limit.tags
        self._decode = decode
        self._is_reasoning = _is_open_after(prompt_end, limit.tags)
        """None while the response may yet begin with an opening tag."""

    @property
    def ending(self) -> str:
        """The text that ends the reasoning."""
        return f"{self._tags.closes[0]}\n\n"

    def is_spent(self, tokens: int) -> bool:
        """Return whether a response of so many tokens still reasons, and may not any more."""
        return self._is_reasoning is True and tokens >= self._max_tokens

    def admit(self, received: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, which follow `received`, belong to the response; not all if they exceed the budget."""
        if self._is_reasoning is False:
            return len(tokens)
        room = max(0, self._max_tokens - len(received))
        last = received[-_TAG_TOKENS:]
        self._look([*last, *tokens[:room]])
        if self._is_reasoning is None:
            self._look([*last, *tokens])
        return min(room, len(tokens)) if self._is_reasoning else len(tokens)

    def _look(self, tokens: list[int]) -> None:
        """Note what the end of the response, or all of it while it is short, says about tags."""
        text = self._decode(tokens)
        if self._is_reasoning is None:
            self._is_reasoning = _begins(text.lstrip(), self._tags.opens)
        if self._is_reasoning and any(tag in text for tag in self._tags.closes):
            self._is_reasoning = False


def _is_open_after(prompt_end: str, tags: ReasoningTags) -> bool | None:
    before = prompt_end.rstrip()
    if before.endswith(tags.closes):
        return False
    return True if before.endswith(tags.opens) or tags.is_open else None


def _begins(text: str, opens: tuple[str, ...]) -> bool | None:
    """Return whether a text begins with one of `opens`; None while that is undecided."""
    if text.startswith(opens):
        return True
    return None if any(tag.startswith(text) for tag in opens) else False
