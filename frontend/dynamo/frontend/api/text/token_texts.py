"""Tokens as text, for answers that show log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.serving.text_models import Vocabulary


class TokenTexts:
    """The text of single tokens; for one request."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            # Some decoders drop the space before the first word of a text; behind itself a token is as it is within one.
            once = self._vocabulary.decode([token], skip_special_tokens=False)
            twice = self._vocabulary.decode([token, token], skip_special_tokens=False)
            text = twice[len(once) :] if twice.startswith(once) else once
            self._known[token] = text
        return text

    def is_special(self, token: int) -> bool:
        """It stands for something, such as the end, and not for text."""
        return bool(self[token]) and not self._vocabulary.decode([token], skip_special_tokens=True)


def text_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None if the token holds only part of a character."""
    return None if "\ufffd" in text else list(text.encode())


def best_first(position: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of one position; an engine may or may not name the chosen one twice."""
    return sorted(dict(position).items(), key=lambda item: -item[1])[:count]
