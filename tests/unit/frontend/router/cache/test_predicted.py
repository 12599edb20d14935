"""Guesses about caches, against a plain list of decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.predicted import PredictedIndex
from dynamo.frontend.router.cache.prefixes import PrefixCounts
from tests.support.fakes import instance
from tests.support.memory import kept_objects

TTL_S = 10.0
FLEET = tuple(map(instance, (1, 2, 3)))
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def chained(path: list[int]) -> list[int]:
    """Like sequence hashes: equal ones mean equal prefixes."""
    hashes: list[int] = []
    for each in path:
        hashes.append(hash((hashes[-1] if hashes else 0, each)) & (2**63 - 1))
    return hashes


def overlap(held: set[int], blocks: list[int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), PATHS, st.integers(0, 20)),
            st.tuples(st.just("leave"), st.integers(0, 2), st.just([0]), st.just(0)),
            st.tuples(st.just("forget"), st.integers(0, 10), st.just([0]), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 8), st.just([0]), st.just(0)),
        ),
        max_size=40,
    ),
    PATHS,
)
def test_predictions_equal_the_decisions_within_the_ttl(events: list[tuple[str, int, list[int], int]], prompt: list[int]) -> None:
    predicted, now = PredictedIndex(TTL_S), 0.0
    decisions: dict[int, tuple[float, InstanceId, list[int]]] = {}
    for kind, number, path, wait_s in events:
        if kind == "wait":
            now += number
            predicted.match(chained(prompt), now)
        elif kind == "add":
            decision = predicted.add(FLEET[number].id, chained(path), now + wait_s)
            decisions[decision] = (now + wait_s + TTL_S, FLEET[number].id, chained(path))
        elif kind == "forget":
            predicted.forget(number)
            decisions.pop(number, None)
        else:
            predicted.remove_instance(FLEET[number].id)
            decisions = {key: each for key, each in decisions.items() if each[1] != FLEET[number].id}
    overlaps = predicted.match(chained(prompt), now).by_position(predicted.index.rows(FLEET))
    size = 0
    for at, each in enumerate(FLEET):
        held = {block for until, owner, blocks in decisions.values() if owner == each.id and until > now for block in blocks}
        assert overlaps.get(at, 0) == overlap(held, chained(prompt))
        size += len(held)
    assert len(predicted) == size


@given(st.lists(PATHS, max_size=20), st.data())
def test_counts_know_what_is_shared_and_forget_what_is_given_back(paths: list[list[int]], data: st.DataObject) -> None:
    counts, taken = PrefixCounts(), [chained(path) for path in paths]
    held: set[int] = set()
    for blocks in taken:
        assert counts.take(blocks) == overlap(held, blocks)
        held.update(blocks)
    for blocks in data.draw(st.permutations(taken)):
        taken.remove(blocks)
        left = {block for each in taken for block in each}
        assert counts.give_back(blocks) == overlap(left, blocks)
        assert len(counts) == len(left)


@pytest.mark.parametrize("leaves", [False, True])
def test_prompts_of_peers_that_contradict_one_another_leave_nothing(leaves: bool) -> None:
    predicted = PredictedIndex(TTL_S, max_blocks=50)
    predicted.add(FLEET[1].id, [1 << 40], 1.0)
    if leaves:
        predicted.remove_instance(FLEET[1].id)
    for start in range(0, 4000, 10):
        a, b, c, z = range(start, start + 4)
        for prompt in ([a], [a, b], [z, b, c], [b]):
            predicted.add_kept(FLEET[0].id, prompt, 0.0)
    for _ in range(100):
        predicted.expire(100.0)
    assert len(predicted) == len(predicted.index) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4, unique=True), st.integers(0, 20)), max_size=30))
def test_however_prompts_contradict_one_another_the_number_of_pairs_is_right(prompts: list[tuple[list[int], int]]) -> None:
    predicted = PredictedIndex(TTL_S, max_blocks=8)
    for now, (blocks, forgotten) in enumerate(prompts):
        predicted.add_kept(FLEET[now % 2].id, blocks, float(now))
        predicted.forget(forgotten)
        assert 0 <= len(predicted) <= 12
    predicted.expire(1000.0)
    predicted.expire(1000.0)
    assert len(predicted) == 0


def test_what_many_cancelled_prompts_leave_is_bounded() -> None:
    predicted = PredictedIndex(TTL_S)
    predicted.add(FLEET[0].id, [1], 1000.0)
    sizes = []
    for number in range(2, 2000):
        predicted.forget(predicted.add(FLEET[0].id, [number], 50.0))
        if number < 400 or number % 7 == 0:  # counting takes longer than adding
            sizes.append(kept_objects(predicted))
    assert max(sizes) <= max(sizes[:390])
