"""Why requests went where they went, for those who ask."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadReport
from dynamo.common.names import InstanceId
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.explanation import DecisionRecord, Explanation
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.policies.balance import LoadRouter, least_loaded
from dynamo.frontend.router_metrics import RouterMetrics
from tests.support.fakes import instance

FLEET = tuple(instance(number) for number in range(1, 101))


class Watched:
    def __init__(self, *, everything: bool = False) -> None:
        self.now = 0.0
        self.kv = KvRouter(clock=lambda: 0.0)
        self.log = DecisionLog(8, everything=everything, clock=lambda: self.now, unix_time=lambda: 1e9 + self.now)
        self.router = MeasuredRouter(self.kv, RouterMetrics(FrontendMetrics(CollectorRegistry())), self.log)
        self._count = 0

    def ask(self, explanation: Explanation | None = None, pinned: Instance | None = None) -> RoutingDecision:
        self._count += 1
        request = RouteRequest(
            model="m",
            booking_id=f"booking {self._count}",
            request_id=f"request {self._count}",
            pinned=None if pinned is None else pinned.id,
            explanation=explanation,
        )
        decision = self.router.pick(request, FLEET)
        self.router.finished(request.booking_id)
        return decision


def test_an_explanation_has_the_cheapest_candidates_and_the_chosen_one() -> None:
    watched, explanation = Watched(), Explanation()
    for number, each in enumerate(FLEET):
        watched.kv.loads.report(each.id, LoadReport(running=number), 0.0)
    watched.ask(explanation, pinned=FLEET[70])
    (found,) = json.loads(explanation.to_json())
    assert (found["request_id"], found["model"], found["reason"]) == ("request 1", "m", "pinned")
    assert (found["instance"], found["instances"], found["cost"], found["at"]) == (f"{71:x}", 100, 70.0, 1e9)
    assert [each["requests"] for each in found["candidates"]] == [*range(15), 70]
    assert [decision.request_id for decision in watched.log.read(5)] == ["request 1"]


def test_an_explanation_fits_into_a_header_however_often_a_call_is_routed() -> None:
    watched, explanation = Watched(), Explanation()
    for _ in range(200):
        watched.ask(explanation)
    text = explanation.to_json()
    assert len(text) < 4096
    assert text.isascii()
    decisions = json.loads(text)
    assert [decision["request_id"] for decision in decisions] == [f"request {number}" for number in range(197, 201)]
    assert [len(decision.get("candidates", ())) for decision in decisions] == [0, 0, 0, 16]


def test_what_was_not_routed_has_no_explanation() -> None:
    assert Explanation().to_json() == b""


def test_decisions_are_explained_only_on_demand() -> None:
    watched = Watched()
    assert watched.ask().candidates == ()
    assert watched.log.read(5) == []


def test_reading_the_log_logs_the_decisions_of_the_next_seconds() -> None:
    watched = Watched()
    watched.log.read(1)
    for _ in range(3):
        watched.now += 0.02
        watched.ask()
    assert [decision.request_id for decision in watched.log.read(2)] == ["request 3", "request 2"]
    watched.now += 15.1
    assert watched.ask().candidates == ()
    assert not watched.log.is_watched
    assert len(watched.log.read(100)) == 3


def test_a_flood_of_requests_is_sampled_for_readers_and_the_log_is_bounded() -> None:
    watched = Watched()
    watched.log.read(1)
    for _ in range(1000):
        watched.now += 0.001
        watched.ask()
    seen = watched.log.read(100)
    assert len(seen) == 8
    assert seen[0].at - seen[7].at == pytest.approx(7 * 0.01, abs=0.02)


def test_at_debug_level_every_decision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(everything=True)
    with caplog.at_level(logging.DEBUG, logger="dynamo.frontend.router.explain"):
        watched.ask()
        watched.ask()
    logged = [msgspec.json.decode(record.getMessage().removeprefix("routed: "), type=DecisionRecord) for record in caplog.records]
    assert [decision.request_id for decision in logged] == ["request 1", "request 2"]


def test_busy_candidates_are_marked() -> None:
    router = LoadRouter("least-loaded", least_loaded, ThresholdTable(Thresholds(active_prefill_tokens=5)), clock=lambda: 0.0)
    router.loads.report(InstanceId(1), LoadReport(queued_prefill_tokens=6), 0.0)
    decision = router.pick(RouteRequest(model="m", booking_id="r"), FLEET[:2], explain=True)
    assert {each["instance"]: each.get("busy", False) for each in decision.candidates} == {"1": True, "2": False}
