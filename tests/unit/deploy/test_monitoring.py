"""Dashboards, alert rules and scalers: every expression is PromQL over metrics and labels that our processes have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from dynamo.common.errors import Code
from dynamo.common.names import Endpoint, new_instance_id
from dynamo.common.telemetry import (
    FrontendMetrics,
    GrpcServerMetrics,
    RequestType,
    RuntimeMetrics,
    WorkerMetrics,
    make_registry,
)
from tests.support.manifests import DEPLOY, parse

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ADDED_BY_PROMETHEUS = {"namespace", "pod", "container", "job", "instance", "le"}


def filled_registry() -> CollectorRegistry:
    """Every metric of every process, with a child of each, so that its labels show."""
    registry = make_registry()
    RuntimeMetrics(registry, role="frontend", version="1")
    model = FrontendMetrics(registry).for_model("m")
    request = model.start("tensor", RequestType.UNARY)
    request.tokens(2)
    request.finish(Code.CANCELLED, input_tokens=1)
    model.rejected("busy")
    model.migrated(ongoing=True)
    GrpcServerMetrics(registry).for_method("s", "m", "unary").handled("OK", 1)
    worker = WorkerMetrics(registry, Endpoint(), new_instance_id()).for_model("m")
    worker.started(1)
    worker.finished(1, 1, Code.INTERNAL)
    return registry


def labels_of_metrics() -> dict[str, set[str]]:
    """Label names by sample name, as a scrape has them."""
    found: dict[str, set[str]] = {}
    for metric in filled_registry().collect():
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


KNOWN = labels_of_metrics()


def dashboard_expressions(path: Path) -> Iterator[tuple[str, str]]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def scalers() -> Iterator[tuple[str, str]]:
    for path in (DEPLOY / "keda").glob("*.yaml"):
        for manifest in parse(path.read_text()):
            for trigger in manifest["spec"].get("triggers", ()):
                yield path.name, trigger["metadata"]["query"]
            for metric in manifest["spec"].get("metrics", ()):
                if metric["type"] == "Pods":
                    yield path.name, metric["pods"]["metric"]["name"]


EXPRESSIONS = [
    *(pytest.param(expr, id=f"{path.stem}: {title}") for path in DASHBOARDS for title, expr in dashboard_expressions(path)),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in rules()),
    *(pytest.param(query, id=name) for name, query in scalers()),
]


def parsed(expression: str) -> promql_parser.Expr:
    """With Grafana's variables replaced as Grafana would."""
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$__range", "1h"))


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from selectors(node.expr)


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
        if name.startswith(("dynamo_frontend_", "dynamo_component_")) and not name.endswith("_created")
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
