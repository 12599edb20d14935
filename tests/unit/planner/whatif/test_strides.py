"""Hashes of samples that tell those of every n-th block, at one stride."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.scaling.demand import MAX_SAMPLE_HASHES, ArrivalSample
from dynamo.planner.whatif.strides import at_one_stride


def sample(stride: int, hashes: Sequence[int]) -> ArrivalSample:
    tokens = stride * len(hashes) + 3
    return ArrivalSample(age_s=0.0, weight=1.0, prompt_tokens=tokens, tokens_per_hash=stride, hashes=pack_hashes(hashes))


def test_what_a_long_prompt_does_not_tell_is_what_a_shorter_one_tells_that_it_goes_on_with() -> None:
    turns = [sample(16, [1, 2, 3, 4]), sample(32, [2, 4, 6]), sample(64, [4, 8])]
    per_hash, [first, second, third] = at_one_stride(turns)
    assert (per_hash, first, second[:4]) == (16, [1, 2, 3, 4], [1, 2, 3, 4])
    assert third[:4] == first


def test_hashes_that_no_sample_tells_are_the_same_for_all_that_have_the_later_one() -> None:
    _, [_, one, other] = at_one_stride([sample(16, [1, 2]), sample(64, [40, 80]), sample(64, [40, 90])])
    assert len(one) == len(other) == 8
    assert one[:4] == other[:4]
    assert not {*one[4:]} & {*other[4:]}
    assert (one[3], one[7], other[7]) == (40, 80, 90)


def test_prompts_of_another_block_size_and_those_without_hashes_have_none() -> None:
    samples = [*(sample(16, [1, 2, 3, 4]) for _ in range(20)), sample(24, [5, 6]), sample(0, [])]
    per_hash, told = at_one_stride(samples)
    assert per_hash == 16
    assert told[-2:] == [[], []]
    assert at_one_stride([sample(0, [])]) == (0, [[]])


def test_there_are_no_more_hashes_than_samples_may_have_on_average() -> None:
    longest = sample(1 << 24, range(1, MAX_SAMPLE_HASHES + 1))
    samples = [*(sample(16, [number]) for number in range(20)), longest]
    per_hash, told = at_one_stride(samples)
    assert sum(len(each) for each in told) <= MAX_SAMPLE_HASHES * len(samples)
    assert per_hash % 16 == 0
    assert told[-1]
