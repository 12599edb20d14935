"""`dynamo_planner_*`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dynamo.common.model_card import Role
from dynamo.planner.process.metrics import PlannerMetrics
from dynamo.planner.process.state import DecisionMade, PlannerState, PoolState

POOLS = (
    PoolState(model="chat", role=Role.PREFILL, target=3, instances=2, arrivals_per_s=1.5, forecast_per_s=2.5),
    PoolState(model="chat", role=Role.DECODE, target=5, instances=4, goodput_share=0.97, warning="out of reach"),
)


def state(*, is_leader: bool = True, error: str = "") -> PlannerState:
    return PlannerState(
        planner="one",
        namespace="dynamo",
        is_leader=is_leader,
        dry_run=False,
        executor="targets",
        interval_s=5.0,
        executor_error=error,
        pools=POOLS,
    )


def metrics(clock: list[float]) -> tuple[PlannerMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return PlannerMetrics(registry, lambda model: 4, lambda: clock[0]), registry


def test_pools_have_their_numbers_under_the_names_of_dynamo_too() -> None:
    made, registry = metrics([0.0])
    made.show(state())
    assert registry.get_sample_value("dynamo_planner_target_instances", {"model": "chat", "role": "prefill"}) == 3
    assert registry.get_sample_value("dynamo_planner_num_prefill_replicas", {"model": "chat"}) == 2
    assert registry.get_sample_value("dynamo_planner_num_decode_replicas", {"model": "chat"}) == 4
    assert registry.get_sample_value("dynamo_planner_predicted_num_decode_replicas", {"model": "chat"}) == 5
    assert registry.get_sample_value("dynamo_planner_observed_requests_per_second", {"model": "chat", "role": "prefill"}) == 1.5
    assert registry.get_sample_value("dynamo_planner_goodput_share", {"model": "chat", "role": "prefill"}) == -1
    assert registry.get_sample_value("dynamo_planner_unreachable_goals", {"model": "chat", "role": "decode"}) == 1


def test_gpu_seconds_are_those_of_the_instances_that_served() -> None:
    clock = [0.0]
    made, registry = metrics(clock)
    made.show(state())
    clock[0] = 1800.0
    made.show(state())
    assert registry.get_sample_value("dynamo_planner_gpu_seconds_total", {"model": "chat"}) == (2 + 4) * 4 * 1800


def test_one_that_stands_by_shows_no_pool_so_that_no_autoscaler_follows_it() -> None:
    made, registry = metrics([0.0])
    made.show(state())
    made.show(state(is_leader=False))
    assert registry.get_sample_value("dynamo_planner_is_leader") == 0
    assert b"chat" not in b"\n".join(line for line in generate_latest(registry).splitlines() if b"target_instances{" in line)


def test_rounds_that_were_not_carried_out_and_changes_and_ignored_messages_are_counted() -> None:
    made, registry = metrics([0.0])
    for error in ("", "away", "away"):
        made.show(state(error=error))
    made.changed(DecisionMade(at=0.0, model="chat", role=Role.DECODE, before=1, instances=2, by="formula", reason=""))
    made.unreadable("demand", 3)
    made.unreadable("demand", 5)
    assert registry.get_sample_value("dynamo_planner_executor_failures_total") == 2
    assert registry.get_sample_value("dynamo_planner_executor_up") == 0
    labels = {"model": "chat", "role": "decode", "by": "formula"}
    assert registry.get_sample_value("dynamo_planner_scaling_events_total", labels) == 1
    assert registry.get_sample_value("dynamo_planner_unreadable_messages_total", {"kind": "demand"}) == 5
