"""What `dynamo-planner explain` prints."""

from __future__ import annotations

import pytest

from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets
from dynamo.planner.pools import Goals
from dynamo.planner.process.explain import main, planner_lines, target_lines
from dynamo.planner.process.state import DecisionMade, PlannerState, PoolState


def test_a_planner_is_explained_by_pool_with_its_last_changes() -> None:
    pool = PoolState(
        model="chat",
        role=Role.PREFILL,
        target=3,
        instances=2,
        missing=1,
        needed=4,
        arrivals_per_s=12.34,
        forecast_per_s=15.0,
        engine_seconds=2.4,
        refused_per_s=0.5,
        waiting=7,
        goodput_share=0.934,
        ttft_ratio=1.1,
        startup_s=42.0,
        observations=100,
        by="formula",
        reason="15 requests/s are expected",
        warning="set a longer goal",
    )
    change = DecisionMade(at=880.0, model="chat", role=Role.PREFILL, before=2, instances=3, by="formula", reason="more came")
    state = PlannerState(
        planner="one",
        namespace="dynamo",
        is_leader=True,
        dry_run=True,
        executor="kubernetes",
        interval_s=5.0,
        holding="NATS cannot be reached",
        executor_error="the API server is away",
        goals=Goals(ttft_s=3.0, itl_s=0.04, share=0.95),
        pools=(pool,),
        decisions=(change,),
    )
    assert list(planner_lines(state, 1000.0)) == [
        "planner one of dynamo: the leader, every 5 s, executor kubernetes, dry run",
        "goals: first token within 3000 ms, a token every 40 ms, for 95.0% of the requests",
        "targets are left as they are: NATS cannot be reached",
        "targets are not carried out: the API server is away",
        "",
        "chat (prefill): 3 wanted, 1 of them not coming, 2 there, 4 needed",
        "  arrivals 12.3/s, forecast 15/s, refused 0.5/s",
        "  work 2.4 engine-seconds/s, 7 requests wait, steps learned from 100 reports",
        "  goodput 93.4% expected; time to first token 1.10 of the predicted; startup 42 s",
        "  by formula: 15 requests/s are expected",
        "  GOALS OUT OF REACH: set a longer goal",
        "",
        "last changes:",
        "  2 min ago  chat (prefill): 2 -> 3 by formula: more came",
    ]


def test_a_planner_without_goals_and_knowledge_says_so() -> None:
    pool = PoolState(model="chat", role=Role.AGGREGATED, target=1, instances=1, by="hold")
    state = PlannerState(
        planner="one", namespace="dynamo", is_leader=False, dry_run=False, executor="targets", interval_s=5.0, pools=(pool,)
    )
    text = "\n".join(planner_lines(state, 0.0))
    assert "standing by" in text
    assert "goals: none but that no instance is overloaded" in text
    assert "no steps learned yet" in text
    assert "goodput no what-if; time to first token not compared; startup not seen" in text


def test_targets_of_etcd_are_explained_without_a_planner() -> None:
    target = PoolTarget(pool=Pool("chat"), instances=3, reason="formula: more came", decided_at=900.0)
    assert list(target_lines(Targets(planner="one", targets=(target,)), 1000.0)) == [
        "targets of planner one",
        "chat: 3, decided 100 s ago, formula: more came",
    ]
    assert list(target_lines(Targets(), 0.0)) == ["no targets: no planner has decided anything"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "localhost:1"], "--url: 'localhost:1' must begin with http"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be reached"),
        (["--jsn"], "--jsn"),
    ],
)
def test_what_cannot_be_explained_ends_with_a_sentence_and_status_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
