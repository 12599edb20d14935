from __future__ import annotations

import pytest

from dynamo.common.errors import DynamoError, EngineError, InstanceGone, NoInstances, Overloaded, ShuttingDown, Unavailable
from dynamo.common.names import InstanceId
from dynamo.frontend.config import RetryOptions
from dynamo.frontend.serving.dispatch import retry as retry_module
from dynamo.frontend.serving.dispatch.retry import Attempt, RetryBudget, RetryBudgets, RetryPolicy, Verdict, died_holding
from tests.support.memory import kept_objects

RETRY, WAIT, RAISE, EXPIRE, BLAME = Verdict.RETRY, Verdict.WAIT, Verdict.RAISE, Verdict.EXPIRE, Verdict.BLAME
NOW = 100.0
GONE = InstanceGone(InstanceId(1), was_held=False)
DIED = InstanceGone(InstanceId(1))
LOST = InstanceGone(InstanceId(1), "lost the request", is_alive=True)
FULL, DRAINING, NONE = Overloaded("full"), ShuttingDown("the worker"), NoInstances("m")
UNCONNECTED = Unavailable("no connection")


@pytest.mark.parametrize(
    ("error", "attempt", "verdict"),
    [
        # The error decides first.
        (GONE, Attempt(), RETRY),
        (LOST, Attempt(), RETRY),
        (FULL, Attempt(), RETRY),
        (DRAINING, Attempt(), RETRY),
        (EngineError("broken"), Attempt(), RAISE),
        (EngineError("broken"), Attempt(is_disturbed=True), RAISE),
        # What has reached the caller is not made again.
        (GONE, Attempt(is_delivered=True), RAISE),
        (GONE, Attempt(is_delivered=True, is_disturbed=True), RAISE),
        # The deadline.
        (GONE, Attempt(deadline=NOW + 1), RETRY),
        (GONE, Attempt(deadline=NOW), EXPIRE),
        (GONE, Attempt(deadline=NOW, is_disturbed=True), EXPIRE),
        (EngineError("broken"), Attempt(deadline=NOW), RAISE),
        # One instance may die of it, a second one is no accident.
        (DIED, Attempt(deaths=1), RETRY),
        (DIED, Attempt(deaths=2), BLAME),
        (DIED, Attempt(deaths=2, is_disturbed=True), BLAME),
        (DIED, Attempt(deaths=2, deadline=NOW), EXPIRE),
        (DIED, Attempt(deaths=2, is_delivered=True), RAISE),
        # Where else it could go.
        (FULL, Attempt(is_pinned=True), RAISE),
        (FULL, Attempt(has_alternative=False), RAISE),
        (FULL, Attempt(number=4), RETRY),
        (FULL, Attempt(number=5), RAISE),
        (NONE, Attempt(was_sent=False, has_alternative=False), RAISE),
        # While our own connection is disturbed, what cannot be reached probably comes back.
        (GONE, Attempt(is_disturbed=True), WAIT),
        (GONE, Attempt(is_disturbed=True, is_pinned=True, has_alternative=False, number=9), WAIT),
        (GONE, Attempt(is_disturbed=True, gives_up_at=NOW + 1), WAIT),
        (GONE, Attempt(is_disturbed=True, gives_up_at=NOW), RAISE),
        (NONE, Attempt(is_disturbed=True, was_sent=False, has_alternative=False), WAIT),
        (UNCONNECTED, Attempt(is_disturbed=True, was_sent=False, has_alternative=False), WAIT),
        (UNCONNECTED, Attempt(is_disturbed=True, was_sent=False, gives_up_at=NOW), RAISE),
        # An instance that refuses was reached.
        (FULL, Attempt(is_disturbed=True), RETRY),
        (DRAINING, Attempt(is_disturbed=True, has_alternative=False), RAISE),
    ],
)
def test_what_follows_a_failed_attempt(error: DynamoError, attempt: Attempt, verdict: Verdict) -> None:
    assert RetryPolicy(RetryOptions(max_attempts=5)).decide(error, attempt, NOW) is verdict


@pytest.mark.parametrize(("error", "is_death"), [(DIED, True), (GONE, False), (LOST, False), (FULL, False), (DRAINING, False)])
def test_an_instance_died_of_a_request_only_if_it_had_it(error: DynamoError, is_death: bool) -> None:
    assert died_holding(error) is is_death


def test_pauses_double_up_to_a_limit_and_are_spread_by_half() -> None:
    assert [RetryPolicy.pause_s(waits, 1.0) for waits in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert RetryPolicy.pause_s(10_000, 0.0) == 0.25


def test_an_idle_frontend_may_still_retry_a_few_times_a_second() -> None:
    budget = RetryBudget(RetryOptions(floor_per_s=10.0, burst=5), now=0.0)
    assert [budget.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert [budget.take(0.25) for _ in range(3)] == [True, True, False]
    assert [budget.take(1000.0) for _ in range(6)] == [True] * 5 + [False]


def test_each_model_and_key_has_a_budget_of_its_own_and_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module, "MAX_BUDGETS", 3)
    budgets = RetryBudgets(RetryOptions(ratio=0.0, floor_per_s=0.0, burst=1), now=0.0)
    of = [("m", "a"), ("m", "b"), ("n", "a")]
    assert [budgets.request(*pair).take(0.0) for pair in [*of, *of]] == [True] * 3 + [False] * 3
    assert budgets.request("o", "a").take(0.0)
    assert not budgets.request("n", "a").take(0.0)
    assert budgets.request("m", "a").take(0.0)
    kept = kept_objects(budgets)
    for number in range(20):
        budgets.request("m", str(number))
    assert kept_objects(budgets) <= kept
