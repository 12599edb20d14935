"""What a whole response is put together from, which counts against `--max-buffered-size` as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dynamo.frontend.preprocess.text import TextDelta

_STEP_BYTES = 64 * 1024
"""Counted at once, so that a short response is not counted."""
_PIECE_BYTES = 64
"""What a piece of text takes beside its characters."""
_TOKEN_BYTES = 36
_LOGPROB_BYTES = 120
"""What a token with its log probability takes, where they are kept as objects."""
_PROMPT_LOGPROB_BYTES = 400
"""What one of a position of the prompt takes: as it came, as it is shown, and encoded."""


class Gathering(msgspec.Struct, eq=False):
    """Counts the deltas that one request keeps until its response is complete."""

    _hold: Callable[[int], None]
    """Counts bytes until the end of the request, and raises Overloaded."""
    _uncounted_bytes: int = 0

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Count deltas that are to be kept. Raises Overloaded."""
        size = self._uncounted_bytes
        for delta in deltas:
            size += _PIECE_BYTES + len(delta.text) + _TOKEN_BYTES * len(delta.tokens)
            if delta.logprobs is not None:
                size += _LOGPROB_BYTES * sum(map(len, delta.logprobs))
        if size > _STEP_BYTES:
            self._hold(size)
            size = 0
        self._uncounted_bytes = size

    def add_prompt(self, positions: Sequence[Sequence[tuple[int, float]] | None]) -> None:
        """Count the log probabilities of a prompt that are to be shown. Raises Overloaded."""
        self._hold(_PROMPT_LOGPROB_BYTES * sum(len(position) for position in positions if position))
