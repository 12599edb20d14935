"""The counter that forgets."""

from __future__ import annotations

import math

import pytest

from dynamo.common.process.decaying import DecayingCounter


def test_what_was_added_long_ago_counts_less() -> None:
    counter = DecayingCounter(memory_s=2.0)
    counter.add(3.0, now=10.0)
    assert counter.at(10.0) == 3.0
    assert counter.at(12.0) == pytest.approx(3.0 / math.e)
    counter.add(1.0, now=12.0)
    assert counter.at(14.0) == pytest.approx((3.0 / math.e + 1.0) / math.e)


def test_a_counter_may_begin_with_an_amount() -> None:
    assert DecayingCounter(1.0, 5.0, 100.0).at(101.0) == pytest.approx(5.0 / math.e)
