"""`benchmarks.router_ablation`: loads without one term of the router's cost."""

from __future__ import annotations

from dataclasses import fields

import pytest

from benchmarks.router_ablation import CONSTANTS, LOADS, WITHOUT, Ratio, Run, changed, compared, replayed, report
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms

ONE = "hot prefixes"
CHANCE = Ratio(1.0, 0.001)


def test_every_weight_and_every_constant_is_taken_away_or_changed() -> None:
    removed = {field.name for field in fields(CostTerms) for terms in WITHOUT.values() if _differs(terms, field.name)}
    assert removed | set(CONSTANTS) == {field.name for field in fields(CostTerms)}
    assert all(sum(_differs(terms, field.name) for field in fields(CostTerms)) == 1 for terms in WITHOUT.values())


def _differs(terms: CostTerms, name: str) -> bool:
    return bool(getattr(terms, name) != getattr(COST_TERMS, name))


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_changed_constant_keeps_its_type(constant: str) -> None:
    value = getattr(changed(constant, 0.5), constant)
    assert value < getattr(COST_TERMS, constant)
    assert type(value) is type(getattr(COST_TERMS, constant))


@pytest.mark.parametrize("name", LOADS)
def test_one_seed_makes_one_load_whose_requests_are_in_order(name: str) -> None:
    rows, again, others = (LOADS[name].rows(seed) for seed in (0, 0, 1))
    assert rows == again != others
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)


@pytest.mark.parametrize(
    ("mean", "error", "worse"), [(1.1, 0.02, True), (1.1, 0.04, False), (1.01, 0.0, False), (0.5, 0.01, False)]
)
def test_only_what_is_beyond_chance_counts_as_worse(mean: float, error: float, worse: bool) -> None:
    assert Ratio(mean, error).is_worse(CHANCE) is worse
    assert not Ratio(mean, error).is_worse(Ratio(1.0, 0.1))


def test_a_router_that_does_not_see_queues_is_found_to_be_worse_where_a_prefix_is_hot() -> None:
    terms = WITHOUT["queue"]
    runs = [run for seed in (0, 1) for run in (Run(ONE, seed), Run(ONE, seed, terms), Run(ONE, seed, other_ties=True))]
    figures = {run: replayed(LOADS, run) for run in runs}
    assert compared(figures, ONE, (0, 1), terms)["mean latency"].mean > 1.0
    lines = report(figures, [ONE], (0, 1), {"queue": terms}).splitlines()
    assert lines[2].startswith("| other ties |")
    assert lines[3].startswith("| queue |")
