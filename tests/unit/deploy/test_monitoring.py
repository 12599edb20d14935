"""Dashboards, alert rules and scalers: every expression is PromQL over metrics and labels that our processes have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from dynamo.common.errors import Cancelled, Code, Overloaded
from dynamo.common.generation import Summary
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import Endpoint, new_instance_id
from dynamo.common.observability.telemetry import LinkMetrics, RuntimeMetrics, SharedMemoryMetrics, make_registry
from dynamo.frontend.metrics import EventMetrics, FrontendMetrics, RequestTimer, RequestType
from dynamo.frontend.port_metrics import GrpcServerMetrics, connection_metrics
from dynamo.planner.config import PlannerConfig
from dynamo.planner.process.metrics import PlannerMetrics
from dynamo.planner.process.state import DecisionMade, PoolState, initial_state
from dynamo.worker.engine.base import TierTotals
from dynamo.worker.engine.sim.engine import SimConfig, SimEngine
from dynamo.worker.observability.metrics import WorkerMetrics
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.observability.triton_metrics import TritonMetrics
from tests.support.promql import ADDED_BY_PROMETHEUS, DASHBOARDS, all_expressions, dashboard_expressions, parsed, rules, selectors


@dataclass
class Memory:
    bytes: Mapping[str, int]
    fallbacks: Mapping[str, int]
    used_bytes: int = 0
    capacity_bytes: int = 1


class Nats:
    last_read_at = 0.0

    def on_reconnect(self, callback: Callable[[], None]) -> None: ...


class TieredEngine(SimEngine):
    """An engine that has a tier before it was started."""

    def tiers(self) -> Mapping[Tier, TierTotals]:
        return {Tier.CPU: TierTotals()}


def filled_registry() -> CollectorRegistry:
    """Every metric of every process, with a child of each, so that its labels show."""
    registry = make_registry()
    RuntimeMetrics(registry, role="frontend", version="1")
    frontend = FrontendMetrics(registry)
    llm = LlmInfo(context_length=1, tokenizer="")
    frontend.describe(ModelCard(name="m", kind=ModelKind.LLM, llm=llm), instances=1, migration_limit=1)
    model = frontend.for_model("m")
    model.decided("kv", 0.1)
    model.canary("passed")
    model.set_left_out(0)
    model.queue_waited(0, 0.1)
    frontend.circuit_changed("m", 0, False)
    request = RequestTimer(model, "tensor", RequestType.UNARY)
    request.tokens(2)
    request.finish(Cancelled(), input_tokens=1)
    RequestTimer(model, "tensor", RequestType.UNARY).finish(Overloaded("busy"))
    model.migrated(ongoing=True)
    model.recovered("died")
    model.overlap.observe(1)
    model.hit_rate.observe(0.5)
    frontend.tier_blocks.labels("m", "cpu").inc(1)
    frontend.tier_found.labels("m", "cpu").observe(0.5)
    LinkMetrics(registry, "dynamo_frontend").follow("events", Nats())
    memory = Memory({"lent": 1}, {"full": 1})
    SharedMemoryMetrics(registry, "dynamo_frontend").show(memory)
    EventMetrics(registry)
    _, grpc = connection_metrics(registry)
    grpc.closed(1)
    registry.register(TritonMetrics(lambda: [VersionStatistics("m", "1")]))
    GrpcServerMetrics(registry).for_method("s", "m", "unary").handled("OK", 1)
    workers = WorkerMetrics(registry, Endpoint(), new_instance_id())
    workers.link.follow("requests", Nats())
    workers.memory.show(memory)
    worker = workers.for_model("m")
    worker.follow(TieredEngine(SimConfig()))
    worker.started(1)
    worker.failed("1", 1, 1, Code.INTERNAL)
    worker.started(1)
    worker.succeeded("1", 1, 1, 0, Summary())
    planner = PlannerMetrics(registry)
    pools = tuple(PoolState(model="m", role=role, target=1, instances=1) for role in (Role.PREFILL, Role.DECODE))
    planner.show(replace(initial_state(PlannerConfig(), "p", "targets"), is_leader=True, pools=pools))
    planner.changed(DecisionMade(at=0.0, model="m", role=Role.DECODE, before=0, instances=1, by="formula", reason=""))
    planner.unreadable("load", 1)
    return registry


def labels_of_metrics() -> dict[str, set[str]]:
    """Label names by sample name, as a scrape has them."""
    found: dict[str, set[str]] = {}
    for metric in filled_registry().collect():
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


KNOWN = labels_of_metrics()


EXPRESSIONS = [pytest.param(expression, id=where) for where, expression in all_expressions()]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_metrics_and_labels_that_exist(expression: str) -> None:
    found = list(selectors(parsed(expression)))
    assert found
    available: set[str] = set(ADDED_BY_PROMETHEUS)
    for selector in found:
        assert selector.name in KNOWN, f"no process has a metric {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= KNOWN[selector.name] | ADDED_BY_PROMETHEUS, f"{selector.name} has no label {labels}"
        available |= KNOWN[selector.name]
    for grouped in re.findall(r"(?:by|on|without|group_left|group_right) \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} - {""} <= available, grouped


def test_a_metric_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no process has a metric dynamo_frontend_request_total"):
        test_an_expression_asks_for_metrics_and_labels_that_exist("rate(dynamo_frontend_request_total[5m])")
    with pytest.raises(AssertionError, match="has no label"):
        test_an_expression_asks_for_metrics_and_labels_that_exist('dynamo_frontend_queued_requests{status="x"}')


def test_every_metric_of_ours_is_on_a_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", selector.name)
        for path in DASHBOARDS
        for _, expression in dashboard_expressions(path)
        for selector in selectors(parsed(expression))
    }
    ours = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in KNOWN
        if name.startswith(("dynamo_frontend_", "dynamo_component_", "dynamo_planner_")) and not name.endswith("_created")
    }
    assert ours - shown <= {"dynamo_frontend_disconnected_clients"}, "counted again by dynamo_frontend_model_cancellation_total"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_imported(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == f"dynamo-{path.stem}"
    assert board["schemaVersion"] >= 39
    variables = {variable["name"] for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, f"{panel['title']} overlaps"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in panel["targets"])))
            assert used <= variables | {"__rate_interval", "__range"}, panel["title"]


def test_the_variables_of_dashboards_ask_for_metrics_and_labels_that_exist() -> None:
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"])
                assert found is not None, variable["definition"]
                assert found[2] in KNOWN[found[1]] | ADDED_BY_PROMETHEUS


def test_an_alert_says_how_bad_it_is_and_names_labels_that_it_has() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in labels.split(",")}
        assert used <= (grouped or ADDED_BY_PROMETHEUS), rule["alert"]
