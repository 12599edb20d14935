"""Token ids out of llama.cpp's chunks, without llama.cpp."""

from __future__ import annotations

import json
from math import isnan

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.worker.engine.llama.stream import ChunkReader, TokenVocabulary, decode_chunk

LLAMA = "🦙".encode()
PIECES = [b"", b"a", b"b", b"ab", *(bytes([byte]) for byte in LLAMA), LLAMA[:2], b"c", b""]
END, A, B, AB, F0, X9F, XA6, X99, F0_9F, C, CONTROL = range(11)
VOCABULARY = TokenVocabulary(PIECES, frozenset({END, CONTROL}))


def chunk(text: str, token: int, count: int) -> bytes:
    position = {"id": token, "token": text, "logprob": -0.5, "top_logprobs": [{"id": C, "logprob": -1.0}]}
    choice = {"text": text, "index": 0, "logprobs": {"content": [position]}, "finish_reason": None}
    return json.dumps({"choices": [choice], "timings": {"predicted_n": count, "cache_n": 3}}).encode()


def read(reader: ChunkReader, *chunks: bytes) -> list[int]:
    return [step[0][0] for data in chunks for step in reader.feed(decode_chunk(data))]


def reader() -> ChunkReader:
    return ChunkReader(VOCABULARY, held=VOCABULARY.silent)


def test_each_chunk_is_a_token_with_its_alternatives() -> None:
    assert reader().feed(decode_chunk(chunk("a", A, 1))) == [[(A, -0.5), (C, -1.0)]]


@pytest.mark.parametrize(("count", "tokens"), [(4, [F0, X9F, XA6, X99]), (3, [F0_9F, XA6, X99])])
def test_tokens_inside_a_character_are_reconstructed_from_their_number(count: int, tokens: list[int]) -> None:
    assert read(reader(), chunk("🦙", X99, count), chunk("a", A, count + 1)) == [*tokens, A]


def test_the_probability_of_a_token_inside_a_character_is_unknown() -> None:
    [first, *_, last] = reader().feed(decode_chunk(chunk("🦙", X99, 3)))
    assert isnan(first[0][1])
    assert last[0] == (X99, -0.5)


def test_a_token_that_may_end_the_generation_waits_for_the_next_chunk() -> None:
    ended, went_on = reader(), reader()
    assert read(ended, chunk("a", A, 1), chunk("", END, 2)) == [A]
    held = ended.end()
    assert held is not None and held[0][0] == END
    assert ended.end() is None
    assert read(went_on, chunk("", CONTROL, 1), chunk("b", B, 2)) == [CONTROL, B]
    assert went_on.end() is None


def test_text_is_spelled_with_the_requested_number_of_tokens_or_the_fewest() -> None:
    assert VOCABULARY.spell(b"abab", 2) == (AB, AB)
    assert VOCABULARY.spell(b"abab", 3) == (AB, A, B)
    assert VOCABULARY.spell(b"abab", 7) == (AB, AB)
    assert VOCABULARY.spell(b"a?", 2) == ()
    assert VOCABULARY.spell(b"a" * 10_000, 9) == ()


@pytest.mark.parametrize(("code", "kind"), [(400, InvalidRequest), (500, EngineError), (503, EngineError)])
def test_an_error_in_the_stream_is_the_callers_or_the_engines(code: int, kind: type[Exception]) -> None:
    data = json.dumps({"error": {"code": code, "message": "so it is", "type": "x"}}).encode()
    error = decode_chunk(data).to_error()
    assert isinstance(error, kind)
    assert "so it is" in str(error)
    assert decode_chunk(chunk("a", A, 1)).to_error() is None
