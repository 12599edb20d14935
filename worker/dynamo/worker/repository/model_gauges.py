"""Gauges of the loaded models of a repository, under Triton's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dynamo.common.telemetry import MAX_MODELS
from dynamo.worker.repository.loaded import LoadedModel

_LABELS = ("model", "version")


class ModelGauges(Collector):
    """Requests that wait, and how long loading took. Versions past the cap are left out."""

    def __init__(self, read: Callable[[], Iterable[LoadedModel]], *, max_versions: int = MAX_MODELS) -> None:
        self._read = read
        self._max_versions = max_versions

    def collect(self) -> Iterator[Metric]:
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            labels=_LABELS,
        )
        load = GaugeMetricFamily("nv_model_load_duration_secs", "Model load time in seconds", labels=_LABELS)
        versions = ((model, version) for model in self._read() for version in model.versions)
        for model, version in islice(versions, self._max_versions):
            pending.add_metric((model.name, version), model.waiting(version))
            load.add_metric((model.name, version), model.load_s)
        yield pending
        yield load
