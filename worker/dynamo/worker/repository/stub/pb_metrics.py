"""The part of `pb_utils` about metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.worker.repository.stub.pb_requests import channel
from dynamo.worker.repository.stub.pb_tensors import Enumeration, TritonModelException, need
from dynamo.worker.repository.wire import wire


class MetricKind(Enumeration):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """Metrics of one name, which the worker shows at `/metrics`. Those of the same name and kind are one family."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        need("the name of a MetricFamily", name, str)
        need("the description of a MetricFamily", description, str)
        need("the kind of a MetricFamily", kind, MetricKind)
        self._name = name
        self._kind = kind
        order = wire.MetricOrder(verb="family", family=name, kind=kind.name.lower(), description=description)
        ordered(order, "Error when creating MetricFamily")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the metric of this family with these labels, which all instances of a model share."""
        if buckets is not None and self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        return Metric(self._name, self._kind, labels or {}, buckets or ())

    def __repr__(self) -> str:
        return f"MetricFamily({self._name!r}, kind={self._kind!r})"


class Metric:
    """One series of a family; made by `MetricFamily.Metric`."""

    def __init__(self, family: str, kind: MetricKind, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        what = "Error when creating Metric"
        if not all(isinstance(value, str) for value in labels.values()):
            raise _refused(what, "attempt to access JSON non-string as string")
        self._family = family
        self._kind = kind
        self._labels = tuple(sorted((str(name), value) for name, value in labels.items()))
        limits = tuple(float(limit) for limit in buckets)
        ordered(wire.MetricOrder(verb="series", family=family, labels=self._labels, buckets=limits), what)

    def __repr__(self) -> str:
        return f"Metric({self._family!r}, kind={self._kind!r}, labels={dict(self._labels)!r})"

    def increment(self, value: float) -> None:
        """Add to a counter or gauge; less than 0 to a gauge only."""
        what = "Failed to increment metric value"
        self._need_kind("Increment", what, MetricKind.COUNTER, MetricKind.GAUGE)
        value = _number(value)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise _refused(what, "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.")
        self._change("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._need_kind("Set", "Failed to set metric value", MetricKind.GAUGE)
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Count an observation of a histogram."""
        self._need_kind("Observe", "Failed to observe metric value", MetricKind.HISTOGRAM)
        self._change("observe", value)

    def value(self) -> float:
        """Return the value of a counter or gauge, to which all instances of the model contribute."""
        what = "Failed to get metric value"
        self._need_kind("Value", what, MetricKind.COUNTER, MetricKind.GAUGE)
        order = wire.MetricOrder(verb="value", family=self._family, labels=self._labels)
        return float(ordered(order, what).parameters["value"])

    def _need_kind(self, operation: str, what: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise _refused(what, f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}")

    def _change(self, verb: str, value: float) -> None:
        amount = _number(value)
        channel().send(wire.MetricOrder(verb=verb, family=self._family, labels=self._labels, amount=amount))


def _number(value: float) -> float:
    """Return a number, also one of numpy, as a float. Raises TypeError for text, which `float` would parse."""
    if isinstance(value, str | bytes):
        raise TypeError(f"the value of a metric must be a number, not {type(value).__name__}")
    return float(value)


def ordered(order: wire.Control | wire.MetricOrder, what: str) -> wire.Response:
    """Return the worker's response. Raises TritonModelException, beginning with `what`."""
    response = channel().control(order)
    if response.error is not None:
        raise _refused(what, response.error)
    return response


def _refused(what: str, why: str) -> TritonModelException:
    instance = channel().instance_name
    return TritonModelException(f"{what}: Failed to process the request for model '{instance}', message: {why}")
