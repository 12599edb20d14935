"""Metrics of Python models: in their process, in the worker, and as they are shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo.common.errors import InvalidRequest
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.python import custom_metrics
from dynamo.worker.repository.python.custom_metrics import CustomMetrics, MetricOwner
from dynamo.worker.repository.wire.wire import MetricOrder
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x

HEAD = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("seen_total", "Rows seen.", pb_utils.MetricFamily.COUNTER)
        self.seen = family.Metric(labels={"model": args["model_name"]})
        gauges = pb_utils.MetricFamily("depth", "Depth.", pb_utils.MetricFamily.GAUGE)
        self.depth = gauges.Metric(labels={"q": 'a"b'})
        family = pb_utils.MetricFamily("size", "Sizes.", pb_utils.MetricFamily.HISTOGRAM)
        self.size = family.Metric(labels={"x": "y"}, buckets=[0.1, 1.0, 10])
"""
COUNTS = (
    HEAD
    + """
    def execute(self, requests):
        self.depth.set(-2)
        self.depth.increment(5)
        for value in (0.05, 1, 100):
            self.size.observe(value)
        self.seen.increment(np.float32(1.5))
        value = np.array([self.seen.value()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]) for _ in requests]
"""
)
ERRORS = (
    HEAD
    + """
    def execute(self, requests):
        Family = pb_utils.MetricFamily
        cases = {
            "negative": lambda: self.seen.increment(-1),
            "set": lambda: self.seen.set(3),
            "observe": lambda: self.depth.observe(3),
            "increment": lambda: self.size.increment(1),
            "value": lambda: self.size.value(),
            "text": lambda: self.seen.increment("1"),
            "kind": lambda: Family("seen_total", "Rows seen.", Family.GAUGE),
            "name": lambda: Family("a-b c", "", Family.GAUGE),
            "no kind": lambda: Family("other", "", 0),
            "label": lambda: Family("seen_total", "Rows seen.", Family.COUNTER).Metric(labels={"a-b": "1"}),
            "value of a label": lambda: Family("seen_total", "", Family.COUNTER).Metric(labels={"a": 1}),
            "buckets": lambda: Family("seen_total", "", Family.COUNTER).Metric(buckets=[1]),
            "no buckets": lambda: Family("size", "", Family.HISTOGRAM).Metric(labels={}),
            "order of buckets": lambda: Family("size", "", Family.HISTOGRAM).Metric(labels={}, buckets=[2, 1]),
        }
        lines = []
        for name, case in cases.items():
            try:
                case()
            except (pb_utils.TritonModelException, TypeError) as error:
                lines.append(f"{name}: {error}")
        value = np.array(lines, np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]) for _ in requests]
"""
)
OF_A_REQUEST = "Failed to process the request for model 'counts_0', message: "


def shown(metrics: CustomMetrics) -> list[str]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode().splitlines()


def values(metrics: CustomMetrics) -> list[str]:
    return [line for line in shown(metrics) if not line.startswith("#")]


def declare(owner: MetricOwner, family: str, kind: str = "counter", *values: str) -> None:
    owner.carry_out(MetricOrder(verb="family", family=family, kind=kind, description="d"))
    for value in values:
        owner.carry_out(MetricOrder(verb="series", family=family, labels=(("a", value),)))


async def seen(models: RepositoryModels) -> float:
    [value] = (await infer(models, "counts", x(1)))["y"]
    return float(value)


async def test_metrics_of_a_model_are_shown_as_in_triton(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS)
    async with opened(tmp_path, "counts") as models:
        assert await seen(models) == 1.5
        assert await seen(models) == 3.0
        assert shown(models.custom_metrics) == [
            "# HELP seen_total Rows seen.",
            "# TYPE seen_total counter",
            'seen_total{model="counts"} 3.0',
            "# HELP depth Depth.",
            "# TYPE depth gauge",
            'depth{q="a\\"b"} 3.0',
            "# HELP size Sizes.",
            "# TYPE size histogram",
            'size_bucket{le="0.1",x="y"} 2.0',
            'size_bucket{le="1.0",x="y"} 4.0',
            'size_bucket{le="10.0",x="y"} 4.0',
            'size_bucket{le="+Inf",x="y"} 6.0',
            'size_count{x="y"} 6.0',
            f'size_sum{{x="y"}} {2 * 101.05}',
        ]
        await models.unload_model("counts")
        assert shown(models.custom_metrics) == []


async def test_what_cannot_be_done_to_a_metric_is_refused_in_triton_s_words(tmp_path: Path) -> None:
    config = X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING')
    python_model(tmp_path, "counts", ERRORS, config)
    async with opened(tmp_path, "counts") as models:
        lines = [line.decode() for line in (await infer(models, "counts", x(1)))["y"]]
    increment = "Failed to increment metric value: " + OF_A_REQUEST
    metric = "Error when creating Metric: " + OF_A_REQUEST
    family = "Error when creating MetricFamily: " + OF_A_REQUEST
    counter, gauge, histogram = (f"TRITONSERVER_METRIC_KIND_{kind}" for kind in ("COUNTER", "GAUGE", "HISTOGRAM"))
    assert lines == [
        f"negative: {increment}{counter} can only be incremented monotonically by non-negative values.",
        f"set: Failed to set metric value: {OF_A_REQUEST}{counter} does not support Set",
        f"observe: Failed to observe metric value: {OF_A_REQUEST}{gauge} does not support Observe",
        f"increment: {increment}{histogram} does not support Increment",
        f"value: Failed to get metric value: {OF_A_REQUEST}{histogram} does not support Value",
        "text: the value of a metric must be a number, not str",
        f"kind: {family}Family name already exists with different type",
        f"name: {family}Invalid metric name",
        "no kind: the kind of a MetricFamily must be MetricKind, not int",
        f"label: {metric}Invalid label name",
        f"value of a label: {metric}attempt to access JSON non-string as string",
        "buckets: Failed to create metric. Unexpected buckets found.",
        "no buckets: Failed to create metric. Missing required buckets.",
        f"order of buckets: {metric}Bucket Boundaries must be strictly sorted",
    ]


async def test_all_instances_of_a_model_count_together(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS, X_TO_Y + "instance_group [ { count: 2 kind: KIND_CPU } ]\n")
    async with opened(tmp_path, "counts") as models:
        assert max(await asyncio.gather(seen(models), seen(models))) == 3.0
        assert 'seen_total{model="counts"} 3.0' in values(models.custom_metrics)


async def test_a_metric_goes_on_in_the_process_that_replaces_one_that_died(tmp_path: Path) -> None:
    dies_once = """
        self.seen.increment(10)
        marker = os.path.join(pb_utils.get_model_dir(), "died")
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        self.depth.set(-2)
"""
    python_model(tmp_path, "counts", COUNTS.replace("\n        self.depth.set(-2)\n", dies_once))
    async with opened(tmp_path, "counts") as models:
        assert await seen(models) == 21.5
        assert 'seen_total{model="counts"} 21.5' in values(models.custom_metrics)


async def test_a_metric_that_was_declared_at_import_does_not_outlive_the_completion(tmp_path: Path) -> None:
    code = """
import triton_python_backend_utils as pb_utils
FAMILY = pb_utils.MetricFamily("early", "", pb_utils.MetricFamily.GAUGE)
METRIC = FAMILY.Metric()

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        METRIC.set(7)
        return config
    def execute(self, requests):
        return [None for _ in requests]
"""
    python_model(tmp_path, "early", code)
    async with opened(tmp_path, "early") as models:
        assert values(models.custom_metrics) == ["early 0.0"]


def test_a_series_stays_until_its_last_owner_has_left() -> None:
    metrics = CustomMetrics()
    former, new = metrics.owner(), metrics.owner()
    declare(former, "shared", "gauge", "1", "2")
    declare(new, "shared", "gauge", "1")
    former.carry_out(MetricOrder(verb="set", family="shared", labels=(("a", "1"),), amount=5))
    former.close()
    assert values(metrics) == ['shared{a="1"} 5.0']
    new.close()
    assert values(metrics) == []
    declare(metrics.owner(), "shared", "counter")  # another kind, now that the family is gone


def test_counters_keep_their_names() -> None:
    metrics = CustomMetrics()
    declare(metrics.owner(), "requests", "counter", "1")
    declare(metrics.owner(), "_total", "counter", "1")
    assert values(metrics) == ['requests{a="1"} 0.0', '_total{a="1"} 0.0']
    assert "# TYPE requests untyped" in shown(metrics)


def test_families_series_and_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_metrics, "MAX_FAMILIES", 2)
    monkeypatch.setattr(custom_metrics, "MAX_SERIES", 3)
    metrics = CustomMetrics()
    owner = metrics.owner()
    declare(owner, "first", "counter", "1", "2")
    declare(owner, "second", "counter", "1", "1")
    with pytest.raises(InvalidRequest, match="at most 3 metrics of models"):
        declare(owner, "second", "counter", "2")
    with pytest.raises(InvalidRequest, match="at most 2 metric families"):
        declare(owner, "third")
    owner.close()
    with pytest.raises(InvalidRequest, match="label 'a' has more than 256 characters"):
        declare(owner, "first", "counter", "v" * 257)
    assert values(metrics) == []


@pytest.mark.parametrize("name", ["dynamo_component_requests", "nv_inference_count", "process_cpu_seconds", "python_info"])
def test_names_of_the_worker_s_own_metrics_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="are those of the worker"):
        declare(CustomMetrics().owner(), name)


@pytest.mark.parametrize(
    ("verb", "labels", "about"),
    [("set", (("a", "1"),), "does not support 'set'"), ("increment", (("a", "2"),), "no metric with these labels")],
)
def test_orders_that_fit_no_metric_change_nothing(verb: str, labels: tuple[tuple[str, str], ...], about: str) -> None:
    metrics = CustomMetrics()
    owner = metrics.owner()
    declare(owner, "first", "counter", "1")
    with pytest.raises(InvalidRequest, match=about):
        owner.carry_out(MetricOrder(verb=verb, family="first", labels=labels, amount=1))
    assert values(metrics) == ['first{a="1"} 0.0']


def test_a_histogram_takes_numbers_beyond_all_of_its_buckets() -> None:
    metrics = CustomMetrics()
    owner = metrics.owner()
    declare(owner, "size", "histogram")
    owner.carry_out(MetricOrder(verb="series", family="size", buckets=()))
    owner.carry_out(MetricOrder(verb="observe", family="size", amount=np.inf))
    assert values(metrics) == ['size_bucket{le="+Inf"} 1.0', "size_count 1.0", "size_sum +Inf"]
    with pytest.raises(InvalidRequest, match="finite"):
        owner.carry_out(MetricOrder(verb="series", family="size", labels=(("a", "b"),), buckets=(1.0, np.inf)))
