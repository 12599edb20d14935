"""The record of what llama.cpp keeps."""

from __future__ import annotations

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.worker.engine.llama_cache import KeptAnswers

SIZE = 4


class Record:
    """Two slots; what is put aside has ten blocks."""

    def __init__(self) -> None:
        self.kv = KvState()
        self._kept = KeptAnswers(self.kv, SIZE, slots=2, aside_tokens=10 * SIZE)

    def add(self, prompt: list[int], output: list[int], found: int = 0) -> None:
        self._kept.add(pack_tokens(prompt), output, found)

    def held(self, tokens: list[int]) -> int:
        """How many leading blocks of these tokens are told to be there."""
        blocks = sequence_hashes(pack_tokens(tokens), SIZE)
        return next((place for place, block in enumerate(blocks) if block not in self.kv), len(blocks))


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_an_answer_is_kept_but_for_its_last_token() -> None:
    record = Record()
    record.add(tokens(0, 10), tokens(10, 7))
    assert record.held(tokens(0, 17)) == 4
    record.add(tokens(50, 10), tokens(60, 6))
    assert record.held(tokens(50, 16)) == 3, "the sixteenth token was never computed with"


def test_a_conversation_that_goes_on_is_kept_once() -> None:
    record = Record()
    record.add(tokens(0, 12), tokens(12, 5))
    record.add(tokens(0, 40), tokens(40, 9), found=16)
    assert record.held(tokens(0, 48)) == 12
    assert len(record.kv) == 12


def test_what_follows_a_shared_beginning_is_overwritten_unless_it_is_most() -> None:
    record = Record()
    record.add(tokens(0, 32), [1])
    record.add(tokens(0, 16) + tokens(500, 16), [1], found=16)
    assert record.held(tokens(0, 32)) == 4, "the second answer took over the slot"
    record.add(tokens(0, 8) + tokens(700, 24), [1], found=8)
    assert record.held(tokens(0, 16) + tokens(500, 16)) == 8, "a quarter was shared: it was put aside"
    assert record.held(tokens(0, 8) + tokens(700, 24)) == 8


def test_the_oldest_leave_when_there_is_too_much_aside() -> None:
    record = Record()
    for number in range(5):
        record.add(tokens(1000 * number, 6 * SIZE), [1])
    assert [record.held(tokens(1000 * number, 6 * SIZE)) for number in range(5)] == [0, 0, 6, 6, 6]
    assert len(record.kv) == 18


def test_what_is_not_found_is_not_there() -> None:
    record = Record()
    record.add(tokens(0, 32), [1])
    record.add(tokens(900, 32), [1])
    record.add(tokens(0, 24) + tokens(300, 8), [1], found=8)
    assert record.held(tokens(0, 32)) == 6, "only what the new answer has computed again"
    assert record.held(tokens(900, 32)) == 8, "others are not concerned"
    record.add(tokens(900, 4), [1], found=0)
    assert record.held(tokens(900, 32)) == 8, "a prompt of one block is computed in any case"
    record.add(tokens(900, 9), [1], found=0)
    assert record.held(tokens(900, 32)) == 2


def test_whatever_comes_the_record_tells_what_it_holds() -> None:
    record = Record()
    for number in range(60):
        prompt = tokens(0, (number * 7) % 23) + tokens(100 * (number % 9), (number * 5) % 31)
        record.add(prompt or [1], tokens(5000 + number % 3, number % 6 + 1), found=number % 40)
        held = {block for kept in record._kept._kept for block in kept.hashes}
        assert set(record.kv.held()) == held == set(record._kept._references)
