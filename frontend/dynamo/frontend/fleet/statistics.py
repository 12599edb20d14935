"""Aggregates the statistics of several instances. All functions may take long: an instance says as much as it likes."""

from __future__ import annotations

from collections.abc import Iterable, Set

from google.protobuf.message import Message

from dynamo.common.errors import EngineError, InvalidRequest, PayloadTooLarge
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.repository import version_order
from dynamo.common.tensors.message_limits import MessageLimits, parse_message
from dynamo.protos.inference_pb2 import InferBatchStatistics, ModelStatistics, ModelStatisticsResponse, StatisticDuration

_MOST = (1 << 64) - 1
_MAX_FIELDS = 1 << 18
"""Fields of what one instance says: a version has some fifty, and ten more for each size of its batches."""
_LIMITS = MessageLimits(max_message_fields=_MAX_FIELDS)


def read_statistics(response: Buffer) -> ModelStatisticsResponse:
    """Return what an instance said. Raises EngineError, and PayloadTooLarge if it has too many fields."""
    try:
        return parse_message(ModelStatisticsResponse, response, _LIMITS)
    except PayloadTooLarge:
        raise
    except InvalidRequest as error:
        raise EngineError("an instance returned statistics that cannot be read") from error


def add_up(parts: Iterable[ModelStatisticsResponse], models: Set[str] | None = None) -> ModelStatisticsResponse:
    """Return the sums of statistics, one entry per model and version, in order of name and version.

    `models`: the only ones of interest; None: all.
    """
    sums: dict[tuple[str, str], ModelStatistics] = {}
    for part in parts:
        said = {(statistics.name, statistics.version): statistics for statistics in part.model_stats}  # of each version once
        for (name, version), statistics in said.items():
            if models is not None and name not in models:
                continue
            total = sums.get((name, version))
            if total is None:
                total = sums[name, version] = ModelStatistics()
                total.CopyFrom(statistics)
            else:
                _add(total, statistics)
    return ModelStatisticsResponse(model_stats=[sums[key] for key in sorted(sums, key=version_order)])


def _add(total: ModelStatistics, more: ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, more.last_inference)
    total.inference_count = _sum(total.inference_count, more.inference_count)
    total.execution_count = _sum(total.execution_count, more.execution_count)
    _add_durations(total.inference_stats, more.inference_stats)
    by_size = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in more.batch_stats:
        existing = by_size.get(batch.batch_size)
        if existing is None:
            existing = total.batch_stats.add()
            existing.batch_size = batch.batch_size
        _add_durations(existing, batch)
    ordered = sorted(total.batch_stats, key=_batch_size)
    del total.batch_stats[:]
    total.batch_stats.extend(ordered)
    for index, response in more.response_stats.items():
        _add_durations(total.response_stats[index], response)
    total.memory_usage.extend(more.memory_usage)  # each instance has memory of its own


def _batch_size(batch: InferBatchStatistics) -> int:
    return batch.batch_size


def _add_durations(total: Message, more: Message) -> None:
    """Add every `StatisticDuration` field of `more` to the same field of `total`, a message of the same type."""
    for field, value in more.ListFields():
        if isinstance(value, StatisticDuration):
            existing: StatisticDuration = getattr(total, field.name)
            existing.count = _sum(existing.count, value.count)
            existing.ns = _sum(existing.ns, value.ns)


def _sum(one: int, other: int) -> int:
    """Return what fits into the field: an instance may say any number."""
    return min(one + other, _MOST)
