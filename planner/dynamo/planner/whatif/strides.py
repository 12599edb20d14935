"""The hashes of sampled prompts at one stride, since a router knows blocks of one size.

A sample tells the hash of every n-th block, the longer its prompt the larger n. Prompts that share a hash share all that is
before it: so the hashes between two of a long prompt are those of a shorter prompt that shares the later one, or, where there is
none, made up from it. Without them, the long prompts, most of which go on with a conversation, would look as if nothing of them
was cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.kv.hashes import HASH_BYTES, unpack_hashes
from dynamo.common.scaling.demand import MAX_SAMPLE_HASHES, ArrivalSample

_FINEST = 0.1
"""A share of samples with a finer stride may be of another block size: they do not decide."""
_HASHES = 1 << 64


def at_one_stride(samples: Sequence[ArrivalSample]) -> tuple[int, list[list[int]]]:
    """Return the tokens between two hashes, 0 if none has any, and the hashes of each sample, none of one that does not fit.

    There are at most `MAX_SAMPLE_HASHES` for each sample on average.
    """
    lengths = [sample.tokens_per_hash * (len(sample.hashes) // HASH_BYTES) for sample in samples]
    strides = sorted(sample.tokens_per_hash for sample in samples if sample.tokens_per_hash)
    if not strides:
        return 0, [[] for _ in samples]
    per_hash = strides[int(_FINEST * (len(strides) - 1))]
    while sum(tokens // per_hash for tokens in lengths) > MAX_SAMPLE_HASHES * len(samples):
        per_hash *= 2
    return per_hash, _told(samples, per_hash)


def _told(samples: Sequence[ArrivalSample], per_hash: int) -> list[list[int]]:
    factors = {sample.tokens_per_hash // per_hash for sample in samples if sample.tokens_per_hash > per_hash}
    known: dict[int, dict[int, list[int]]] = {factor: {} for factor in factors}
    """By how many hashes end with it: a hash, and those."""
    told: list[list[int]] = [[] for _ in samples]
    for position in sorted(range(len(samples)), key=lambda position: samples[position].tokens_per_hash):
        stride, hashes = samples[position].tokens_per_hash, unpack_hashes(samples[position].hashes)
        if not stride or (per_hash % stride and stride % per_hash):
            continue
        if stride <= per_hash:
            every = per_hash // stride
            fine = list(hashes[every - 1 :: every])
        else:
            factor = stride // per_hash
            fine = [each for last in hashes for each in known[factor].get(last) or _made_up(last, factor)]
        told[position] = fine
        for factor, ends in known.items():
            if factor * per_hash > stride:
                for end in range(factor, len(fine) + 1, factor):
                    ends.setdefault(fine[end - 1], fine[end - factor : end])
    return told


def _made_up(last: int, count: int) -> list[int]:
    """Return so many hashes that end with this one, the same for all prompts that have it."""
    return [*((last + number) % _HASHES for number in range(1, count)), last]
