"""Single tokens as text and as bytes, for responses with log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.serving.text.text_models import Vocabulary


class TokenTexts:
    """Maps token ids to their text; caches the tokens of one request."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        """`as_ids`: show tokens as `token_id:17`, which tells tokens apart that have no text of their own."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._cached: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text(token)

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the bytes of a token, which may be a part of a character; None if they are not known."""
        text = self._text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        data = self._vocabulary.token_bytes(token)
        return None if data is None else list(data)

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, such as end of sequence, that has no text in a response."""
        return bool(self._text(token)) and not self._vocabulary.decode([token], skip_special_tokens=True)

    def _text(self, token: int) -> str:
        text = self._cached.get(token)
        if text is None:
            # Some decoders drop the space before the first word of a text; the second of two equal tokens keeps it.
            once = self._vocabulary.decode([token], skip_special_tokens=False)
            twice = self._vocabulary.decode([token, token], skip_special_tokens=False)
            text = twice[len(once) :] if twice.startswith(once) else once
            self._cached[token] = text
        return text


def best_first(position: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens of one position, each once even if the engine lists the chosen one twice."""
    return sorted(dict(position).items(), key=lambda item: -item[1])[:count]
