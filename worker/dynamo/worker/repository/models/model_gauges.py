"""Gauges of the loaded models of a repository, under Triton's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prometheus_client import Metric
from prometheus_client.registry import Collector

from dynamo.common.observability.telemetry import MAX_MODELS
from dynamo.worker.observability.triton_metrics import version_labels
from dynamo.worker.repository.models.loaded import LoadedModel


class ModelGauges(Collector):
    """Requests that wait, and how long loading took. Versions past the cap are left out."""

    def __init__(self, read: Callable[[], Iterable[LoadedModel]], *, max_versions: int = MAX_MODELS) -> None:
        self._read = read
        self._max_versions = max_versions

    def collect(self) -> Iterator[Metric]:
        pending = Metric(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
        )
        load = Metric("nv_model_load_duration_secs", "Model load time in seconds", "gauge")
        versions = ((model, version) for model in self._read() for version in model.versions)
        for model, version in islice(versions, self._max_versions):
            labels = version_labels(model.name, version, model.config.metric_tags)
            pending.add_sample(pending.name, labels, model.waiting(version))
            load.add_sample(load.name, labels, model.load_s)
        yield pending
        yield load
