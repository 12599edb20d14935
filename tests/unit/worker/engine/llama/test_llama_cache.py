"""The record of what llama.cpp keeps."""

from __future__ import annotations

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.llama.cache import PrefixCacheMirror

SIZE = 4


class Record:
    """A mirror of two slots and ten blocks in the memory beside them."""

    def __init__(self) -> None:
        self.kv = KvState()
        self.mirror = PrefixCacheMirror(self.kv, SIZE, slots=2, aside_tokens=10 * SIZE, token_bytes=100)

    def add(self, prompt: list[int], output: list[int], cached_tokens: int = 0) -> None:
        self.mirror.add(pack_tokens(prompt), output, cached_tokens)

    def cached_blocks(self, tokens: list[int], *tiers: Tier) -> int:
        """Return how many leading blocks of `tokens` are published as cached, on these tiers or on any."""
        blocks = sequence_hashes(pack_tokens(tokens), SIZE)
        held = {block for tier in tiers or Tier for block in self.kv.held(tier)}
        return next((position for position, block in enumerate(blocks) if block not in held), len(blocks))


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_a_sequence_is_kept_except_for_its_last_token() -> None:
    record = Record()
    record.add(tokens(0, 10), tokens(10, 7))
    assert record.cached_blocks(tokens(0, 17)) == 4
    record.add(tokens(50, 10), tokens(60, 6))
    assert record.cached_blocks(tokens(50, 16)) == 3, "the sixteenth token was never computed with"


def test_a_continued_conversation_is_kept_once() -> None:
    record = Record()
    record.add(tokens(0, 12), tokens(12, 5))
    record.add(tokens(0, 40), tokens(40, 9), cached_tokens=16)
    assert record.cached_blocks(tokens(0, 48)) == 12
    assert len(record.kv) == 12


def test_the_rest_after_a_shared_prefix_is_overwritten_unless_it_is_most_of_the_sequence() -> None:
    record = Record()
    record.add(tokens(0, 32), [1])
    record.add(tokens(0, 16) + tokens(500, 16), [1], cached_tokens=16)
    assert record.cached_blocks(tokens(0, 32)) == 4, "the second sequence took over the slot"
    record.add(tokens(0, 8) + tokens(700, 24), [1], cached_tokens=8)
    assert record.cached_blocks(tokens(0, 16) + tokens(500, 16)) == 8, "a quarter was shared: it was put aside"
    assert record.cached_blocks(tokens(0, 8) + tokens(700, 24)) == 8


def test_the_oldest_leave_when_there_is_too_much_aside() -> None:
    record = Record()
    for number in range(5):
        record.add(tokens(1000 * number, 6 * SIZE), [1])
    assert [record.cached_blocks(tokens(1000 * number, 6 * SIZE)) for number in range(5)] == [0, 0, 6, 6, 6]
    assert len(record.kv.held(Tier.GPU)) == 12
    assert len(record.kv.held(Tier.CPU)) == 6


def test_a_sequence_that_leaves_its_slot_is_in_the_hosts_memory_and_comes_back_when_it_is_continued() -> None:
    record = Record()
    for first in (0, 1000, 2000):
        record.add(tokens(first, 6 * SIZE), [1])
    assert [record.cached_blocks(tokens(first, 6 * SIZE), Tier.CPU) for first in (0, 1000, 2000)] == [6, 0, 0]
    assert [record.cached_blocks(tokens(first, 6 * SIZE), Tier.GPU) for first in (0, 1000, 2000)] == [0, 6, 6]
    record.add(tokens(0, 8 * SIZE), [1], cached_tokens=6 * SIZE)
    assert record.cached_blocks(tokens(0, 8 * SIZE), Tier.GPU) == 8
    assert record.cached_blocks(tokens(0, 8 * SIZE), Tier.CPU) == 0, "llama.cpp moves a sequence, and keeps no copy"
    assert record.cached_blocks(tokens(1000, 6 * SIZE), Tier.CPU) == 6, "another one had to leave its slot for it"


def test_hits_are_those_of_the_tier_from_which_a_prompt_was_continued() -> None:
    record = Record()
    gpu, cpu = record.mirror.totals[Tier.GPU], record.mirror.totals[Tier.CPU]
    for first in (0, 1000, 2000):
        record.add(tokens(first, 6 * SIZE), [1])
    assert (gpu.hits, gpu.misses, cpu.hits, cpu.misses) == (0, 15, 0, 15)  # the last token of a prompt is computed in any case
    assert (cpu.written_bytes, cpu.read_bytes) == (6 * SIZE * 100, 0)
    record.add(tokens(0, 8 * SIZE), [1], cached_tokens=6 * SIZE)
    assert (gpu.hits, gpu.misses, cpu.hits, cpu.misses) == (0, 22, 6, 16)
    assert cpu.read_bytes == 6 * SIZE * 100
    record.add(tokens(0, 9 * SIZE), [1], cached_tokens=8 * SIZE)
    assert (gpu.hits, cpu.hits, cpu.misses) == (8, 6, 16)


def test_a_cache_miss_removes_the_blocks_from_the_record() -> None:
    record = Record()
    record.add(tokens(0, 32), [1])
    record.add(tokens(900, 32), [1])
    record.add(tokens(0, 24) + tokens(300, 8), [1], cached_tokens=8)
    assert record.cached_blocks(tokens(0, 32)) == 6, "only what the new sequence has computed again"
    assert record.cached_blocks(tokens(900, 32)) == 8, "others are not concerned"
    record.add(tokens(900, 4), [1], cached_tokens=0)
    assert record.cached_blocks(tokens(900, 32)) == 8, "a prompt of one block is computed in any case"
    record.add(tokens(900, 9), [1], cached_tokens=0)
    assert record.cached_blocks(tokens(900, 32)) == 2


def test_the_published_blocks_always_equal_the_recorded_ones() -> None:
    record = Record()
    for number in range(60):
        prompt = tokens(0, (number * 7) % 23) + tokens(100 * (number % 9), (number * 5) % 31)
        record.add(prompt or [1], tokens(5000 + number % 3, number % 6 + 1), cached_tokens=number % 40)
        for tier in (Tier.GPU, Tier.CPU):
            assert set(record.kv.held(tier)) == record.mirror.blocks(tier)
