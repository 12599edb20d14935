"""Responses of engines are read within bounds: an instance that says more is refused before it costs anything."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.common.errors import EngineError
from dynamo.common.generation import (
    MAX_DELTA_TOKENS,
    Delta,
    GenerateRequest,
    Summary,
    delta_encoder,
    read_summary,
    summary_encoder,
)
from dynamo.frontend.serving.text.deltas import decoded

PLAIN = GenerateRequest(model="m", prompt=b"")
WITH_LOGPROBS = GenerateRequest(model="m", prompt=b"", logprobs=0)


def logprobs(count: int) -> bytes:
    """A response with so many tokens, and as many lists of no log probability, of one byte each."""
    return msgspec.msgpack.encode([[], 0, None, [[]] * count])


@pytest.mark.parametrize(
    ("request_", "body", "words"),
    [
        (PLAIN, logprobs(70_000), "its log probabilities have 70005 bytes; at most 65536 are allowed"),
        (WITH_LOGPROBS, logprobs(MAX_DELTA_TOKENS + 2), "array.*of length <= 262145"),
        (
            WITH_LOGPROBS,
            msgspec.msgpack.encode([[], 0, None, [[(0, 0.0)] * 800_000]]),
            "log probabilities have .* at most 8388608",
        ),
        (PLAIN, msgspec.msgpack.encode([[5] * (MAX_DELTA_TOKENS + 1)]), "array.*of length <= 262144"),
        (PLAIN, delta_encoder.encode(Delta(text="a" * 2**25)), "at most 33554432 are allowed"),
        (PLAIN, b"\xff", "cannot be read"),
    ],
)
def test_a_response_that_is_too_long_is_refused(request_: GenerateRequest, body: bytes, words: str) -> None:
    """Fifty million empty lists of log probabilities held a frontend for more than 30 s, and took 3.9 GB."""
    with pytest.raises(EngineError, match=words):
        decoded(request_, [body])


@pytest.mark.parametrize(
    ("request_", "delta"),
    [
        (PLAIN, Delta((5,), 1)),
        (PLAIN, Delta((5,) * MAX_DELTA_TOKENS)),
        (PLAIN, Delta(text="a" * 2**20)),
        (PLAIN, Delta((5,), logprobs=[[(5, -1.0)]])),
        (WITH_LOGPROBS, Delta((5,) * 10_000, logprobs=[[(5, -1.0)] * 20] * 10_000)),
    ],
)
def test_what_an_engine_may_say_at_once_is_read_as_it_was_written(request_: GenerateRequest, delta: Delta) -> None:
    assert decoded(request_, [delta_encoder.encode(delta)] * 2) == [delta] * 2


def test_a_summary_that_is_too_long_is_refused() -> None:
    assert read_summary(summary_encoder.encode(Summary(prompt_logprobs=[None] * 1000))).prompt_logprobs == [None] * 1000
    with pytest.raises(ValueError, match="at most 4194304 are allowed"):
        read_summary(summary_encoder.encode(Summary(prompt_logprobs=[None] * 5_000_000)))
