"""`nv_inference_*`: what the statistics of a worker's models count, under the names that Triton's dashboards use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from prometheus_client import Metric
from prometheus_client.metrics_core import UnknownMetricFamily
from prometheus_client.registry import Collector

from dynamo.common.telemetry import MAX_MODELS, OTHER_MODEL
from dynamo.worker.statistics import VersionStatistics

_LABELS = ("model", "version")
_HELP: Mapping[str, str] = {
    "request_success": "Requests that succeeded.",
    "count": "Rows of the requests that succeeded.",
    "exec_count": "Runs of the model; a batch is one.",
    "request_duration_us": "Of requests that succeeded: from arrival to the end, in total.",
    "queue_duration_us": "Of requests that succeeded: waiting for the model, in total.",
    "compute_input_duration_us": "Of computed requests: reading inputs, in total.",
    "compute_infer_duration_us": "Of computed requests: running the model, in total.",
    "compute_output_duration_us": "Of computed requests: making responses, in total.",
}
_FAILURES = "Requests that failed."
_FAILURE = "request_failure"


class TritonMetrics(Collector):
    """The statistics of all models that `read` returns at a scrape. Versions past the cap share the label `other`.

    They have no type, as their names are none of counters. Those of an unloaded model are gone, as in Triton.
    """

    def __init__(self, read: Callable[[], Iterable[VersionStatistics]], *, max_versions: int = MAX_MODELS) -> None:
        self._read = read
        self._max_versions = max_versions

    def collect(self) -> Iterator[Metric]:
        """Runs on another thread than requests: it reads numbers, and iterates over nothing that grows."""
        values: Counter[tuple[str, ...]] = Counter()
        failures: Counter[tuple[str, ...]] = Counter()
        versions = iter(tuple(self._read()))
        for own in islice(versions, self._max_versions):
            _add(own, (own.name, own.version), values, failures)
        for own in versions:
            _add(own, (OTHER_MODEL, OTHER_MODEL), values, failures)
        families = {name: UnknownMetricFamily(f"nv_inference_{name}", text, labels=_LABELS) for name, text in _HELP.items()}
        for (name, *labels), value in values.items():
            families[name].add_metric(labels, value)
        yield from families.values()
        family = UnknownMetricFamily(f"nv_inference_{_FAILURE}", _FAILURES, labels=(*_LABELS, "reason"))
        for key, value in failures.items():
            family.add_metric(key, value)
        yield family


def _add(
    own: VersionStatistics, labels: tuple[str, str], values: Counter[tuple[str, ...]], failures: Counter[tuple[str, ...]]
) -> None:
    inference = own.inference()
    values.update(
        {
            ("request_success", *labels): inference.success.count,
            ("count", *labels): own.inferences,
            ("exec_count", *labels): own.executions,
            ("request_duration_us", *labels): inference.success.ns // 1000,
            ("queue_duration_us", *labels): inference.queue.ns // 1000,
            ("compute_input_duration_us", *labels): inference.compute_input.ns // 1000,
            ("compute_infer_duration_us", *labels): inference.compute_infer.ns // 1000,
            ("compute_output_duration_us", *labels): inference.compute_output.ns // 1000,
        }
    )
    failures.update({(*labels, "OTHER"): own.fail.count, (*labels, "CANCELED"): own.cancellations})
