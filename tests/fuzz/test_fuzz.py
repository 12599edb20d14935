from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
MUTATIONS = 300

targets = pytest.mark.parametrize("name", TARGETS)


def inputs(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[position:position] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del changed[position : position + rng.randint(1, 8)]
            case 2 if position < len(changed):
                changed[position] ^= 1 << rng.randrange(8)
            case _:
                changed[position:] = changed[position:] * 2
    return bytes(changed[:4096])


@targets
def test_a_target_accepts_a_part_of_its_corpus(name: str) -> None:
    accepted = [TARGETS[name](data) for data in inputs(name)]
    assert any(accepted)


@targets
def test_mutations_of_the_corpus_raise_only_what_is_handled(name: str) -> None:
    rng = random.Random(name)
    for data in inputs(name):
        for _ in range(MUTATIONS):
            TARGETS[name](mutated(data, rng))
