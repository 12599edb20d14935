"""What `make costs` compares, and that it fails when it has to."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from benchmarks.costs.command import print_changed, verdict
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


def test_a_gain_of_more_than_two_percent_has_to_be_written() -> None:
    comparison = compare({CALLS: 1000.0, SENDS: 3.0}, {CALLS: 979.0, SENDS: 3.0})
    assert comparison.fell == {CALLS: (1000.0, 979.0)}
    assert (comparison.passed, comparison.failed) == (1, 1)


def test_a_smaller_gain_passes() -> None:
    assert compare({CALLS: 1000.0}, {CALLS: 981.0}).failed == 0


def test_a_gain_that_is_not_kept_is_named_with_the_command_that_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file := tmp_path / "python3.11.json", {CALLS: 1000.0, "other | worker | calls": 1.0})
    assert verdict(file, {"completion": Counted({CALLS: 900.0}, {})}, is_part=True) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"NOT KEPT: {CALLS}: 1000 → 900 (-10.0%)",
        "gains that the file does not keep: python -m benchmarks.costs --write",
        "0 passed, 1 failed",
    ]


def test_a_python_without_figures_fails_and_says_of_which_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "python3.11.json", {CALLS: 1.0})
    assert verdict(tmp_path / "python3.99.json", {"completion": Counted({CALLS: 1.0}, {})}, is_part=False) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NO FIGURES of this version of Python: python3.99.json") and "those of python3.11;" in lines[0]
    assert lines[1:] == ["0 passed, 1 failed"]


def test_a_run_that_counts_nothing_fails(tmp_path: Path) -> None:
    write(file := tmp_path / "python3.11.json", {CALLS: 1.0})
    assert verdict(file, {}, is_part=True) == 2


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


class _Tracked:
    """An object that the garbage collector tracks, and that comes from no free list."""


def _dropped_at_once() -> None:
    for _ in range(100):
        _Tracked()


def _kept() -> int:
    kept = set()
    for _ in range(100):
        kept.add(_Tracked())
    return len(kept)


def _only_calls() -> None:
    for _ in range(100):
        _nothing()
        "text".upper()


_VARIABLES = [ContextVar[int](f"variable_{number}") for number in range(40)]


def _only_variables() -> None:
    """How many nodes of a context's tree that makes differs from run to run."""
    for variable in _VARIABLES:
        variable.set(1)


def _nothing() -> None:
    """What the profiler makes to watch this call is no allocation."""


def test_objects_that_outlive_a_call_are_counted_and_those_of_the_profiler_are_not() -> None:
    assert _allocations(_kept) == _allocations(_kept)
    assert 100 <= _allocations(_kept) <= 102
    assert _allocations(_only_calls) == 0
    assert _allocations(_dropped_at_once) == 0
    assert _allocations(_only_variables) <= 1


def _allocations(function: Any) -> int:
    """Count as if the function were one of dynamo, since tests are not counted."""
    counted = FunctionType(function.__code__.replace(co_filename="dynamo/module.py"), globals())
    count, process = Count(), Process("worker")
    with count.window():
        process.context.run(counted)
    return count.figures["worker", "allocations"]


def test_two_counts_of_a_routing_decision_are_equal() -> None:
    """Allocations are equal within a hundredth: at times an object comes from a free list that earlier tests have filled."""
    first, second = _decisions(), _decisions()
    path = "routing decision among 8 instances | frontend | allocations"
    allocations = first.pop(path)
    assert allocations > 10 and allocations == pytest.approx(second.pop(path), rel=0.01)
    assert first == second
    assert first["routing decision among 8 instances | frontend | calls"] > 10


@pytest.mark.slow  # two runs of the command
def test_what_was_counted_before_changes_no_figure_by_more_than_a_hundredth() -> None:
    """Allocations may differ: at times an object comes from a free list that other requests have filled."""
    path = "tensor of 64 B, REST, JSON, c1"
    alone, after_another = (_row(path, only) for only in (path, f"{path}|tensor of 64 KiB, gRPC, c16"))
    assert len(alone) > 10
    assert after_another == pytest.approx(alone, rel=0.01)


def _row(path: str, only: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.costs", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {path} |")]
    assert rows, done.stdout + done.stderr
    return [float(figure.replace(",", "")) for figure in re.findall(r"[\d,.]+", rows[0].removeprefix(f"| {path} |"))]


def _decisions() -> dict[str, float]:
    count = Count()
    recorder, loop = Recorder(count, re.compile("among 8")), Loop(count)
    try:
        loop.run_until_complete(count_decisions(loop, recorder))
    finally:
        loop.close()
    return {name: value for counted in recorder.paths.values() for name, value in counted.figures.items()}
