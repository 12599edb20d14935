"""The PromQL that `deploy/` holds: dashboards, alert rules, scalers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.support.manifests import DEPLOY, parse

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ADAPTER = DEPLOY / "prometheus" / "adapter.yaml"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
ADDED_BY_PROMETHEUS = {"namespace", "pod", "container", "job", "instance", "le"}
"""Labels that no process of ours has."""


def dashboard_expressions(path: Path) -> Iterator[tuple[str, str]]:
    """(title of the panel, expression)"""
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def scalers() -> Iterator[tuple[str, str]]:
    """(file, query)"""
    for path in (DEPLOY / "keda").glob("*.yaml"):
        for manifest in parse(path.read_text()):
            for trigger in manifest["spec"].get("triggers", ()):
                yield path.name, trigger["metadata"]["query"]
            for metric in manifest["spec"].get("metrics", ()):
                if metric["type"] == "Pods":
                    yield path.name, metric["pods"]["metric"]["name"]
                if metric["type"] == "External":
                    labels = ", ".join(f'{name}="{value}"' for name, value in external_labels(metric).items())
                    yield path.name, f"{metric['external']['metric']['name']}{{{labels}}}"


def external_labels(metric: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the labels by which an HPA chooses a series of an external metric."""
    labels: Mapping[str, str] = metric["external"]["metric"]["selector"]["matchLabels"]
    return labels


def adapted() -> Iterator[tuple[str, str]]:
    """(name of the metric that an adapter serves, query for it)"""
    for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["external"]:
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
        yield rule["name"]["as"], query.replace("<<.LabelMatchers>>", 'namespace="x"').replace("<<.GroupBy>>", "namespace")


def all_expressions() -> Iterator[tuple[str, str]]:
    """(where it stands, expression)"""
    for path in DASHBOARDS:
        for title, expression in dashboard_expressions(path):
            yield f"{path.stem}: {title}", expression
    for rule in rules():
        yield rule["alert"], rule["expr"]
    yield from scalers()
    yield from adapted()


def parsed(expression: str) -> promql_parser.Expr:
    """With Grafana's variables replaced as Grafana would."""
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$__range", "1h"))


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """Every metric that an expression asks for, with its matchers."""
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
