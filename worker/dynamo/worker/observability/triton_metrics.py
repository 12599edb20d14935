"""`nv_inference_*`: what the statistics of a worker's models count, under the names that Triton's dashboards use."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from prometheus_client import Metric
from prometheus_client.registry import Collector

from dynamo.common.observability.telemetry import MAX_MODELS, OTHER_MODEL
from dynamo.worker.observability.statistics import VersionStatistics

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


_WINDOW_S = 60.0
"""Quantiles are those of requests that ended within it, as in Triton."""
_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_DURATIONS = ("request", "queue", "compute_input", "compute_infer", "compute_output")


_Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which of Triton's metrics of latencies are shown."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = _QUANTILES

    @classmethod
    def of(cls, settings: Iterable[str]) -> MetricsConfig:
        """Return the settings of the form NAME=VALUE, as Triton's `--metrics-config` takes them. Raises ValueError."""
        config = cls()
        for setting in settings:
            name, _, value = setting.partition("=")
            match name:
                case "counter_latencies":
                    config = replace(config, counter_latencies=_boolean(name, value))
                case "summary_latencies":
                    config = replace(config, summary_latencies=_boolean(name, value))
                case "summary_quantiles":
                    config = replace(config, summary_quantiles=tuple(_quantile(part) for part in value.split(",")))
                case _:
                    raise ValueError(f"counter_latencies, summary_latencies or summary_quantiles must be set, got {name!r}")
        return config


def _boolean(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value == "true"


def _quantile(text: str) -> float:
    """Read `QUANTILE:ERROR`. The error is not used: quantiles are exact."""
    quantile, _, error = text.partition(":")
    try:
        number, _ = float(quantile), float(error)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"summary_quantiles must be pairs QUANTILE:ERROR between 0 and 1, got {text!r}")
    return number


def version_labels(model: str, version: str, tags: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the labels of a version's metrics. `tags`: the `metric_tags` of its configuration."""
    return {"model": model, "version": version, **{f"_{name}": value for name, value in (tags or {}).items()}}


class TritonMetrics(Collector):
    """The statistics of all models that `read` returns at a scrape. Versions past the cap share the label `other`.

    They have no type, as their names are none of counters. Those of an unloaded model are gone, as in Triton.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[VersionStatistics]],
        config: MetricsConfig = MetricsConfig(),  # it is immutable
        *,
        max_versions: int = MAX_MODELS,
    ) -> None:
        self._read = read
        self._config = config
        self._max_versions = max_versions

    def collect(self) -> Iterator[Metric]:
        """Runs on another thread than requests: it reads numbers, and iterates over nothing that grows."""
        values: Counter[tuple[str, _Labels]] = Counter()
        failures: Counter[_Labels] = Counter()
        all_versions = tuple(self._read())
        versions = iter(all_versions)
        for own in islice(versions, self._max_versions):
            _add(own, version_labels(own.name, own.version, own.tags), values, failures)
        for own in versions:
            _add(own, version_labels(OTHER_MODEL, OTHER_MODEL), values, failures)
        families = {name: Metric(f"nv_inference_{name}", text, "unknown") for name, text in _HELP.items()}
        for (name, labels), value in values.items():
            families[name].add_sample(families[name].name, dict(labels), value)
        yield from (family for name, family in families.items() if self._config.counter_latencies or not name.endswith("_us"))
        family = Metric(f"nv_inference_{_FAILURE}", _FAILURES, "unknown")
        for labels, value in failures.items():
            family.add_sample(family.name, dict(labels), value)
        yield family
        if self._config.summary_latencies:
            yield from self._summaries(all_versions[: self._max_versions])

    def _summaries(self, versions: Sequence[VersionStatistics]) -> Iterator[Metric]:
        """Yield the quantiles of the last minute, and sum and count of all requests."""
        since = time.monotonic() - _WINDOW_S
        for name in _DURATIONS:
            text = _HELP[f"{name}_duration_us"].replace(", in total", "")
            metric = Metric(f"nv_inference_{name}_summary_us", text, "summary")
            for own in versions:
                labels = version_labels(own.name, own.version, own.tags)
                total = getattr(own.inference(), "success" if name == "request" else name)
                metric.add_sample(f"{metric.name}_count", labels, total.count)
                metric.add_sample(f"{metric.name}_sum", labels, total.ns // 1000)
                recent = sorted(getattr(each, name) for each in tuple(own.latencies or ()) if each.ended_s >= since)
                for quantile in self._config.summary_quantiles:
                    metric.add_sample(metric.name, {**labels, "quantile": f"{quantile:g}"}, _value_at(quantile, recent))
            yield metric


def _value_at(quantile: float, ordered: Sequence[float]) -> float:
    """Return a quantile of ordered values; NaN if there are none."""
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan


def _add(
    own: VersionStatistics, shown: Mapping[str, str], values: Counter[tuple[str, _Labels]], failures: Counter[_Labels]
) -> None:
    inference = own.inference()
    labels = tuple(shown.items())
    values.update(
        {
            ("request_success", labels): inference.success.count,
            ("count", labels): own.inferences,
            ("exec_count", labels): own.executions,
            ("request_duration_us", labels): inference.success.ns // 1000,
            ("queue_duration_us", labels): inference.queue.ns // 1000,
            ("compute_input_duration_us", labels): inference.compute_input.ns // 1000,
            ("compute_infer_duration_us", labels): inference.compute_infer.ns // 1000,
            ("compute_output_duration_us", labels): inference.compute_output.ns // 1000,
        }
    )
    failures.update({(*labels, ("reason", reason.value)): count for reason, count in own.failures.items()})
    failures.update({(*labels, ("reason", "CANCELED")): own.cancellations})
