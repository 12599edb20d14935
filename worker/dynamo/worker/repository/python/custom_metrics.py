"""Metrics that Python models declare and change themselves, shown among those of the worker.

The values live here and not in the processes: all instances of a model contribute to one series, which goes on when a process
is started again. It is dropped when the last model that declared it is unloaded.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dynamo.common.errors import InvalidRequest
from dynamo.worker.repository.wire.wire import MetricOrder

Labels: TypeAlias = tuple[tuple[str, str], ...]

MAX_FAMILIES = 256
MAX_SERIES = 4096
MAX_BUCKETS = 128
MAX_LABELS = 32
MAX_NAME_CHARS = 256
"""Characters of names of families and labels, and of values of labels, at most."""
MAX_DESCRIPTION_CHARS = 1024

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("dynamo_", "nv_", "process_", "python_")
_KINDS = ("counter", "gauge", "histogram")


@dataclass(slots=True)
class _Series:
    owners: set[MetricOwner]
    limits: tuple[float, ...] = ()
    """Upper limits of the buckets of a histogram."""
    value: float = 0.0
    """Value of a counter or gauge; sum of all observations of a histogram."""
    counts: list[int] = field(default_factory=list)
    """Observations of a histogram by bucket, the last beyond all limits."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.value += value


@dataclass(slots=True)
class _Family:
    kind: str
    description: str
    owners: set[MetricOwner] = field(default_factory=set)
    series: dict[Labels, _Series] = field(default_factory=dict)


class MetricOwner:
    """What a loaded model holds of the metrics; see `CustomMetrics.owner`."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics = metrics

    def carry_out(self, order: MetricOrder) -> float:
        """Carry out an order of a process. Return the value that `value` asks for, else 0. Raises InvalidRequest."""
        return self._metrics.carry_out(order, self)

    def close(self) -> None:
        """Drop the metrics that no other model has declared."""
        self._metrics.drop(self)


class CustomMetrics(Collector):
    """All families of one worker. Scrapes come from other threads."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._series = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CustomMetrics, families={len(self._families)}, series={self._series}>"

    def owner(self) -> MetricOwner:
        """Return an owner for the metrics of a model. Close it."""
        return MetricOwner(self)

    def carry_out(self, order: MetricOrder, owner: MetricOwner) -> float:
        with self._lock:
            match order.verb:
                case "family":
                    self._declare(order, owner)
                case "series":
                    self._add(order, owner)
                case _:
                    return self._change(order)
        return 0.0

    def _declare(self, order: MetricOrder, owner: MetricOwner) -> None:
        family = self._families.get(order.family)
        if family is None:
            _check_name(order)
            if len(self._families) >= MAX_FAMILIES:
                raise InvalidRequest(f"a worker has at most {MAX_FAMILIES} metric families of models")
            family = self._families[order.family] = _Family(order.kind, order.description)
        elif family.kind != order.kind:
            raise InvalidRequest("Family name already exists with different type")
        family.owners.add(owner)

    def _add(self, order: MetricOrder, owner: MetricOwner) -> None:
        family = self._family(order)
        series = family.series.get(order.labels)
        if series is None:
            _check_series(order, family.kind)
            if self._series >= MAX_SERIES:
                raise InvalidRequest(f"a worker has at most {MAX_SERIES} metrics of models")
            counts = [0] * (len(order.buckets) + 1) if family.kind == "histogram" else []
            series = family.series[order.labels] = _Series(set(), order.buckets, counts=counts)
            self._series += 1
        series.owners.add(owner)

    def _change(self, order: MetricOrder) -> float:
        family = self._family(order)
        series = family.series.get(order.labels)
        if series is None:
            raise InvalidRequest(f"metric family '{order.family}' has no metric with these labels")
        match order.verb, family.kind:
            case "value", "counter" | "gauge":
                pass
            case "increment", "counter" | "gauge":
                series.value += order.amount
            case "set", "gauge":
                series.value = order.amount
            case "observe", "histogram":
                series.observe(order.amount)
            case _:
                raise InvalidRequest(f"a {family.kind} does not support '{order.verb}'")
        return series.value

    def _family(self, order: MetricOrder) -> _Family:
        family = self._families.get(order.family)
        if family is None:
            raise InvalidRequest(f"there is no metric family '{order.family}'")
        return family

    def drop(self, owner: MetricOwner) -> None:
        with self._lock:
            for name, family in list(self._families.items()):
                for labels, series in list(family.series.items()):
                    series.owners.discard(owner)
                    if not series.owners:
                        del family.series[labels]
                        self._series -= 1
                family.owners.discard(owner)
                if not family.owners:
                    del self._families[name]

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return [_to_metric(name, family) for name, family in self._families.items() if family.series]


def _check_name(order: MetricOrder) -> None:
    name = order.family
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise InvalidRequest("Invalid metric name")
    if name.startswith(_RESERVED):
        raise InvalidRequest(f"names that begin with {' or '.join(_RESERVED)} are those of the worker")
    if order.kind not in _KINDS:
        raise InvalidRequest(f"the kind of a metric family must be {', '.join(_KINDS)}, got '{order.kind}'")
    if len(order.description) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(f"the description of a metric family has at most {MAX_DESCRIPTION_CHARS} characters")


def _check_series(order: MetricOrder, kind: str) -> None:
    if len(order.labels) > MAX_LABELS:
        raise InvalidRequest(f"a metric has at most {MAX_LABELS} labels")
    for name, value in order.labels:
        if not _LABEL.fullmatch(name) or len(name) > MAX_NAME_CHARS or (kind == "histogram" and name == "le"):
            raise InvalidRequest("Invalid label name")
        if len(value) > MAX_NAME_CHARS:
            raise InvalidRequest(f"the value of label '{name}' has more than {MAX_NAME_CHARS} characters")
    if len(order.buckets) > MAX_BUCKETS:
        raise InvalidRequest(f"a histogram has at most {MAX_BUCKETS} buckets")
    if not all(map(math.isfinite, order.buckets)):
        raise InvalidRequest("Bucket Boundaries must be finite")
    if not all(lower < upper for lower, upper in pairwise(order.buckets)):
        raise InvalidRequest("Bucket Boundaries must be strictly sorted")


def _to_metric(name: str, family: _Family) -> Metric:
    """Return a family as it is shown. A counter keeps its name: without the suffix `_total` its type cannot be shown."""
    shown, kind = name, family.kind
    if kind == "counter":
        shown = name.removesuffix("_total") or name
        kind = "unknown" if shown == name else kind
    metric = Metric(shown, family.description, kind)
    for labels, series in family.series.items():
        if family.kind != "histogram":
            metric.add_sample(name, dict(labels), series.value)
            continue
        limits = [*map(floatToGoString, series.limits), "+Inf"]
        for limit, count in zip(limits, accumulate(series.counts), strict=True):
            metric.add_sample(f"{name}_bucket", {**dict(labels), "le": limit}, count)
        metric.add_sample(f"{name}_count", dict(labels), sum(series.counts))
        metric.add_sample(f"{name}_sum", dict(labels), series.value)
    return metric
