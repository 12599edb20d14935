"""Counters that cost a hot path one addition: increments are kept here until the registry is scraped.

    tally = Tally(registry)                      # before the metrics it counts for
    requests = tally.amount(counter.labels("m"))
    requests.value += 1                          # on the event loop only

An increment of the metrics library takes a lock and, in a frontend of several processes, a write to a mapped file. These
processes `flush` periodically, since any of them may serve the scrape.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector


class Amount:
    """The pending increment of a bound counter or gauge."""

    __slots__ = ("_metric", "value")

    def __init__(self, metric: Counter | Gauge) -> None:
        self._metric = metric
        self.value: float = 0

    def flush(self) -> None:
        if self.value:
            self._metric.inc(self.value)
            self.value = 0


class Spread:
    """The pending observations of a histogram, or of its child with `labels`, which is made when there are some."""

    __slots__ = ("_bounds", "_child", "_counts", "_histogram", "_is_empty", "_labels", "_total")

    def __init__(self, histogram: Histogram, labels: tuple[str, ...] = ()) -> None:
        self._histogram = histogram
        self._labels = labels
        self._child: Histogram | None = None if labels else histogram
        self._bounds = histogram._upper_bounds[:-1]  # larger values belong to the bucket +Inf, the last
        self._counts = [0] * len(histogram._upper_bounds)
        self._total = 0.0
        self._is_empty = True

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        self._is_empty = False

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add observations that are sorted into the same buckets already; `total` is their sum."""
        for bucket, count in enumerate(counts):
            self._counts[bucket] += count
        self._total += total
        self._is_empty = False

    def flush(self) -> None:
        if self._is_empty:
            return
        if self._child is None:
            self._child = self._histogram.labels(*self._labels)
        for bucket, count in zip(self._child._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(self._total)
        self._counts = [0] * len(self._counts)
        self._total = 0.0
        self._is_empty = True


class Reading:
    """A gauge that shows what a function returns."""

    __slots__ = ("_gauge", "_read")

    def __init__(self, gauge: Gauge, read: Callable[[], float]) -> None:
        self._gauge = gauge
        self._read = read

    def flush(self) -> None:
        self._gauge.set(self._read())


class TotalReading:
    """A counter that shows a sum which a function returns."""

    __slots__ = ("_counter", "_read", "_shown")

    def __init__(self, counter: Counter, read: Callable[[], float]) -> None:
        self._counter = counter
        self._read = read
        self._shown = 0.0

    def flush(self) -> None:
        total = self._read()
        if total > self._shown:
            self._counter.inc(total - self._shown)
            self._shown = total


class Tally(Collector):
    """All pending increments and observations of one registry. It exports no metrics itself.

    A scrape by the thread that made it flushes; one by another thread shows what the last `flush` left, since increments are not
    safe to read from there.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting: list[Amount | Spread | Reading | TotalReading] = []
        self._thread = threading.get_ident()
        registry.register(self)  # collectors are collected in the order of their registration

    def amount(self, metric: Counter | Gauge) -> Amount:
        made = Amount(metric)
        self._waiting.append(made)
        return made

    def spread(self, histogram: Histogram, *labels: str) -> Spread:
        """Return pending observations of a histogram; it has dozens of series, which a model without requests does not get."""
        made = Spread(histogram, labels)
        self._waiting.append(made)
        return made

    def show(self, gauge: Gauge, read: Callable[[], float]) -> None:
        """Set a gauge to what `read` returns, at each flush, and so on the event loop, unlike `set_function`."""
        self._waiting.append(Reading(gauge, read))

    def show_total(self, counter: Counter, read: Callable[[], float]) -> None:
        """Have a counter show what `read` returns at each flush: a sum that only grows."""
        self._waiting.append(TotalReading(counter, read))

    def flush(self) -> None:
        for waiting in self._waiting:
            waiting.flush()

    def collect(self) -> Iterable[Metric]:
        if threading.get_ident() == self._thread:
            self.flush()
        return ()
