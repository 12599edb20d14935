"""What `make costs` compares, and that it fails when it has to."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.costs.command import print_changed
from benchmarks.costs.counting import Count
from benchmarks.costs.deployment import Loop
from benchmarks.costs.events import count_decisions
from benchmarks.costs.figures import compare, read, write
from benchmarks.costs.recording import Counted, Recorder
from tests.simulation.clock import Process


@pytest.fixture(autouse=True)
def _collector_waits() -> Iterator[None]:
    """Counting needs the garbage collector to wait, and leaves what was there before to no collection."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


CALLS = "completion | worker | calls"
SENDS = "completion | worker | sends"


def test_a_figure_that_grew_by_more_than_one_percent_fails() -> None:
    comparison = compare({CALLS: 1000.0, SENDS: 1.0}, {CALLS: 1011.0, SENDS: 1.0})
    assert comparison.grew == {CALLS: (1000.0, 1011.0)}
    assert (comparison.passed, comparison.failed) == (1, 1)


def test_a_figure_that_grew_by_less_passes() -> None:
    assert compare({CALLS: 1000.0}, {CALLS: 1009.0}).failed == 0


def test_one_more_system_call_for_each_request_fails() -> None:
    assert compare({SENDS: 0.5}, {SENDS: 0.55}).failed == 1


def test_the_last_digit_of_a_tiny_figure_may_change() -> None:
    assert compare({SENDS: 0.016}, {SENDS: 0.03}).failed == 0


def test_what_appears_where_there_was_nothing_fails() -> None:
    assert compare({"completion | all | garbage": 0.0}, {"completion | all | garbage": 1.0}).failed == 1


def test_a_new_path_must_be_written() -> None:
    comparison = compare({}, {CALLS: 1.0})
    assert comparison.unwritten == (CALLS,) and comparison.failed == 1


def test_a_path_that_is_not_counted_any_more_fails() -> None:
    comparison = compare({CALLS: 1.0}, {})
    assert comparison.uncounted == (CALLS,) and comparison.failed == 1


def test_what_fell_is_told_and_passes() -> None:
    comparison = compare({CALLS: 1000.0}, {CALLS: 900.0})
    assert comparison.fell == {CALLS: (1000.0, 900.0)} and comparison.failed == 0


def test_the_file_has_a_line_for_each_figure_in_order(tmp_path: Path) -> None:
    file, figures = tmp_path / "python3.11.json", {SENDS: 1.5, CALLS: 2.0}
    write(file, figures)
    assert file.read_text().splitlines() == ["{", f'"{CALLS}": 2.0,', f'"{SENDS}": 1.5', "}"]
    assert read(file) == figures


def test_only_functions_that_are_called_more_or_less_often_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, before = tmp_path / "functions.json", {("worker", "a.py:same"): 2.0, ("worker", "a.py:gone"): 1.0}
    print_changed(file, {"completion": Counted({}, before)})
    assert not capsys.readouterr().out
    print_changed(file, {"completion": Counted({}, {("worker", "a.py:same"): 2.0, ("worker", "a.py:new"): 3.0})})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["+3.00", "calls", "of", "completion", "|", "worker", "|", "a.py:new"],
        ["-1.00", "calls", "of", "completion", "|", "worker", "|", "a.py:gone"],
    ]


_CLOCKS = """
import asyncio
from benchmarks.costs import clock
clock.install()
from time import monotonic, perf_counter_ns, time
from tests.support.virtual_time import run
async def main() -> None:
    begun = perf_counter_ns()
    await asyncio.sleep(100)
    print(monotonic(), perf_counter_ns() - begun, time() % 1000)
run(main())
"""


def test_modules_that_keep_a_clock_are_in_virtual_time_as_well() -> None:
    done = subprocess.run([sys.executable, "-c", _CLOCKS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100.0", "100000000000", "100.0"]


def test_only_processes_are_counted_and_only_in_the_window() -> None:
    count, process = Count(), Process("worker")
    with count.window():
        process.context.run(re.purge)
        re.purge()
    process.context.run(re.purge)
    assert count.figures["worker", "calls"] == 1
    assert {process for process, _ in count.figures} == {"worker", "all"}


def test_two_counts_of_a_routing_decision_are_equal() -> None:
    first, second = _decisions(), _decisions()
    assert first == second
    assert first["routing decision among 8 instances | frontend | calls"] > 10


def _decisions() -> dict[str, float]:
    count = Count()
    recorder, loop = Recorder(count, re.compile("among 8")), Loop(count)
    try:
        loop.run_until_complete(count_decisions(loop, recorder))
    finally:
        loop.close()
    return {name: value for counted in recorder.paths.values() for name, value in counted.figures.items()}
