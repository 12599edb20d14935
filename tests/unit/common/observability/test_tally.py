"""Counters that wait until the registry is scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from dynamo.common.observability.tally import Tally


def test_a_counter_shows_the_sum_that_a_function_returns() -> None:
    registry = CollectorRegistry()
    tally = Tally(registry)
    sums = iter((3.0, 3.0, 10.0))
    tally.show_total(Counter("blocks", "…", registry=registry), lambda: next(sums))
    assert [registry.get_sample_value("blocks_total") for _ in range(3)] == [3.0, 3.0, 10.0]


def test_a_counter_never_falls() -> None:
    registry = CollectorRegistry()
    tally = Tally(registry)
    sums = iter((3.0, 1.0, 4.0))
    tally.show_total(Counter("blocks", "…", registry=registry), lambda: next(sums))
    assert [registry.get_sample_value("blocks_total") for _ in range(3)] == [3.0, 3.0, 4.0]
