"""What several pools get of GPUs that are fewer than they want."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.cost.step_model import StepTimes
from dynamo.planner.budget import share_gpus
from dynamo.planner.pools import Arrivals, Decision, Engine, InstanceView, PoolView

ENGINE = Engine(times=StepTimes(0.006, 0.0001, 0.0003, 0.0, 200.0))


def share(
    wanted: dict[str, int],
    budget: int,
    *,
    there: dict[str, int] | None = None,
    gpus: dict[str, int] | None = None,
    least: int = 1,
    rates: dict[str, float] | None = None,
    misses: dict[str, list[float]] | None = None,
) -> dict[str, int]:
    """How many instances each model gets. `there`: how many it has; default: none."""
    decisions = [
        Decision(
            pool=Pool(model),
            instances=number,
            forecast_per_s=(rates or {}).get(model, 1.0),
            misses_per_s=(misses or {}).get(model, ()),
        )
        for model, number in wanted.items()
    ]
    views = {
        Pool(model): PoolView(
            pool=Pool(model),
            now=0.0,
            arrivals=Arrivals(seconds=5.0),
            engine=ENGINE,
            instances=tuple(InstanceView(id=InstanceId(number)) for number in range((there or {}).get(model, 0))),
        )
        for model in wanted
    }
    shared = share_gpus(
        decisions,
        views,
        budget,
        gpus_of=lambda model: (gpus or {}).get(model, 1),
        least_of=lambda model: min(least, wanted[model]),
    )
    return {decision.pool.model: decision.instances for decision in shared}


def test_where_there_is_enough_each_pool_gets_what_it_wants() -> None:
    assert share({"a": 3, "b": 5}, 8) == {"a": 3, "b": 5}


def test_where_there_is_not_all_lose_the_same_share() -> None:
    assert share({"a": 4, "b": 8}, 6) == {"a": 2, "b": 4}


def test_each_has_its_least_before_any_has_more() -> None:
    assert share({"a": 2, "b": 30}, 8, least=2) == {"a": 2, "b": 6}


def test_where_not_even_the_least_fit_models_with_more_requests_come_first() -> None:
    assert share({"a": 1, "b": 1, "c": 1}, 2, rates={"a": 1.0, "b": 9.0, "c": 5.0}) == {"a": 0, "b": 1, "c": 1}


def test_an_instance_counts_with_its_gpus_and_what_is_left_goes_to_those_that_it_is_enough_for() -> None:
    assert share({"large": 2, "small": 4}, 10, gpus={"large": 8}) == {"large": 1, "small": 2}
    assert share({"large": 2, "small": 4}, 12, gpus={"large": 8}) == {"large": 1, "small": 4}


def test_gpus_go_to_the_model_that_loses_most_without() -> None:
    misses = {"a": [8.0, 4.0, 2.0, 1.0, 0.5], "b": [8.0, 7.0, 6.0, 5.0, 4.0]}
    assert share({"a": 4, "b": 4}, 5, misses=misses) == {"a": 3, "b": 2}
    assert share({"a": 4, "b": 4}, 7, misses=misses) == {"a": 3, "b": 4}
    assert share({"a": 4, "b": 4}, 5, misses=misses, least=2) == {"a": 3, "b": 2}


def test_what_a_gpu_saves_counts_where_instances_have_several() -> None:
    misses = {"large": [10.0, 7.0, 4.0], "small": [10.0, 9.0, 8.0, 7.0, 6.0]}
    assert share({"large": 2, "small": 4}, 10, gpus={"large": 4}, misses=misses) == {"large": 1, "small": 4}
    assert share({"large": 2, "small": 4}, 10, gpus={"large": 2}, misses=misses) == {"large": 2, "small": 4}
    assert share({"large": 2, "small": 4}, 6, gpus={"large": 2}, misses=misses) == {"large": 2, "small": 2}


def test_goals_out_of_reach_take_nothing_from_others_but_the_least_and_get_what_they_leave() -> None:
    misses = {"lost": [9.0] * 9, "other": [4.0, 3.0, 2.0, 1.0, 0.0]}
    assert share({"lost": 8, "other": 4}, 6, misses=misses, least=2) == {"lost": 2, "other": 4}
    assert share({"lost": 8, "other": 4}, 9, misses=misses, least=2) == {"lost": 5, "other": 4}


def test_instances_that_help_only_together_are_given_together_or_not() -> None:
    misses = {"steps": [6.0, 6.0, 6.0, 0.0], "even": [3.0, 2.0, 1.0, 0.0]}
    assert share({"steps": 3, "even": 3}, 4, misses=misses, least=0) == {"steps": 3, "even": 1}
    assert share({"steps": 3, "even": 3}, 2, misses=misses, least=0) == {"steps": 0, "even": 2}


def test_gpus_of_instances_that_are_to_leave_are_given_on_when_they_have_left() -> None:
    assert share({"a": 2, "b": 6}, 8, there={"a": 6, "b": 2}) == {"a": 2, "b": 2}
    assert share({"a": 2, "b": 6}, 8, there={"a": 4, "b": 2}) == {"a": 2, "b": 4}
    assert share({"a": 2, "b": 6}, 8, there={"a": 2, "b": 2}) == {"a": 2, "b": 6}


def test_a_decision_that_was_cut_says_so() -> None:
    decision = Decision(pool=Pool("a"), instances=5, by="formula", reason="more came")
    view = PoolView(pool=Pool("a"), now=0.0, arrivals=Arrivals(seconds=5.0), engine=ENGINE)
    [cut] = share_gpus([decision], {Pool("a"): view}, 3, gpus_of=lambda model: 1, least_of=lambda model: 1)
    assert (cut.instances, cut.by, cut.reason) == (3, "budget", "more came; 3 instead of 5 by the budget of 3 GPUs")


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 8))),
    st.integers(1, 60),
    st.dictionaries(st.sampled_from("abcdef"), st.lists(st.floats(0.0, 9.0), max_size=12)),
)
def test_no_share_is_more_than_is_wanted_or_than_the_gpus_that_are_free(
    pools: dict[str, tuple[int, int, int]], budget: int, misses: dict[str, list[float]]
) -> None:
    wanted, there, gpus = ({model: each[what] for model, each in pools.items()} for what in range(3))
    shared = share(wanted, budget, there=there, gpus=gpus, misses=misses)
    assert all(shared[model] <= wanted[model] for model in wanted)
    assert sum(shared[model] * gpus[model] for model in wanted) <= budget
    grown = sum(max(0, shared[model] - there[model]) * gpus[model] for model in wanted)
    free = budget - sum(there[model] * gpus[model] for model in wanted)
    assert grown <= max(0, free)
