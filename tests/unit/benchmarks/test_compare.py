"""The table of `make compare`."""

from __future__ import annotations

from benchmarks.compare import report
from benchmarks.measuring import Result


def _result(done: int, frontend_s: float) -> Result:
    return Result("c", "ours", done, 1.0, cpu_s={"frontend": frontend_s, "worker": 0.1, "nats": 0.0})


def test_ratios_are_those_of_pairs_and_come_with_their_range() -> None:
    pairs = [(_result(100, 0.1), _result(200, 0.1)), (_result(100, 0.1), _result(100, 0.1)), (_result(50, 0.1), _result(75, 0.1))]
    row = report({"1 token": pairs}).splitlines()[2]
    assert row.startswith("| 1 token | 100 → 100 | 1.50 (1.00–2.00) | 1.000 → 1.000 | 0.67 (0.50–1.00) |")


def test_a_process_that_took_no_time_has_no_ratio() -> None:
    assert report({"1 token": [(_result(1, 0.1), _result(1, 0.1))]}).splitlines()[2].endswith("| 0.000 → 0.000 | - |")
