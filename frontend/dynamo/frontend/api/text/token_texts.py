"""Single tokens as text, for responses with log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.serving.text_models import Vocabulary


class TokenTexts:
    """Maps token ids to their text; caches the tokens of one request."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._cached: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._cached.get(token)
        if text is None:
            # Some decoders drop the space before the first word of a text; the second of two equal tokens keeps it.
            once = self._vocabulary.decode([token], skip_special_tokens=False)
            twice = self._vocabulary.decode([token, token], skip_special_tokens=False)
            text = twice[len(once) :] if twice.startswith(once) else once
            self._cached[token] = text
        return text

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, such as end of sequence, that has no text in a response."""
        return bool(self[token]) and not self._vocabulary.decode([token], skip_special_tokens=True)


def text_bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token's text; None if the token holds only part of a character."""
    return None if "\ufffd" in text else list(text.encode())


def best_first(position: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens of one position, each once even if the engine lists the chosen one twice."""
    return sorted(dict(position).items(), key=lambda item: -item[1])[:count]
