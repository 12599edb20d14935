"""Which token comes next: a fixed function of the whole sequence so far and a seed.

So a generation that moves to another instance goes on exactly as it would have, wherever prompt and output were cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_U64 = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_CHUNK = 4096
_POWERS: NDArray[np.uint64] = np.multiply.accumulate(np.full(_CHUNK, _BASE, dtype=np.uint64)) * np.uint64(pow(_BASE, -1, 2**64))
"""base^0, base^1, … modulo 2^64."""

START = 0
"""State of the empty sequence."""


def advance(state: int, token: int) -> int:
    """Return the state of a sequence after one more token."""
    return (state * _BASE + token + 1) & _U64


def state_of(*tokens: int) -> int:
    """Return the state of a short sequence."""
    state = START
    for token in tokens:
        state = (state * _BASE + token + 1) & _U64
    return state


def advance_all(state: int, tokens: NDArray[np.uint32]) -> int:
    """Return the state after many more tokens, which equals `advance` for each."""
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK].astype(np.uint64) + np.uint64(1)
        folded = int(np.add.reduce(chunk[::-1] * _POWERS[: len(chunk)], dtype=np.uint64))
        state = (state * pow(_BASE, len(chunk), 2**64) + folded) & _U64
    return state


def next_token(state: int, seed: int, vocabulary: int) -> int:
    """Return the next token, below `vocabulary`."""
    return next_token_and_state(state, seed, vocabulary)[0]


def next_token_and_state(state: int, seed: int, vocabulary: int) -> tuple[int, int]:
    """Return `next_token` and the state after it, in one call: the simulated engine makes one for each token."""
    mixed = (state ^ seed) * _MIX & _U64
    token = (mixed ^ mixed >> 32) * _MIX % 2**64 * vocabulary >> 64
    return token, (state * _BASE + token + 1) & _U64
