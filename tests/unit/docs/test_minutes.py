"""Pages, and the table of the gate, promise the minutes that `make help` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.gate.suites import SUITES

ROOT = Path(__file__).parents[3]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/testing.md"]
PROMISE = re.compile(r"make ([\w-]+)(?![-=\w])[^\n()]*\((?:at most )?(\d+) minutes?\)")
TIMED = {"unit", "integration", "test", "slow", "test-all", "test-vllm", "test-backends", "test-clients", "simulate", "drill"} | {
    *("fuzz", "kills", "differential", "triton-examples", "lint", "costs"),
}


def minutes_in(text: str) -> set[tuple[str, str]]:
    return set(PROMISE.findall(text))


HELP = minutes_in((ROOT / "Makefile").read_text())


def test_make_help_says_of_each_kind_of_test_how_long_it_takes() -> None:
    assert sorted(target for target, _ in HELP) == sorted(TIMED)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_promises_the_minutes_that_make_help_does(page: str) -> None:
    promised = minutes_in((ROOT / page).read_text())
    assert "test" in {target for target, _ in promised}
    assert promised <= HELP


def test_the_sizes_add_up() -> None:
    minutes = {target: int(number) for target, number in HELP}
    assert minutes["unit"] + minutes["integration"] == minutes["test"]
    assert 0 <= minutes["test"] + minutes["slow"] - minutes["test-all"] <= 1  # both are rounded up


def test_the_table_of_the_gate_says_the_same_of_what_it_runs_unchanged() -> None:
    table = (ROOT / "docs" / "testing.md").read_text().partition("\n## The gate\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", table, re.MULTILINE))
    unchanged = {suite.name: suite.command.removeprefix("make ") for suite in SUITES if suite.command.count(" ") == 1}
    assert {"test", "slow", "differential", "vllm"} <= unchanged.keys()
    assert {(target, rows[name]) for name, target in unchanged.items()} <= HELP


def test_all_inputs_of_the_fuzzer_end_within_the_minutes_that_it_has_at_most() -> None:
    source = (ROOT / "tests" / "fuzz" / "__main__.py").read_text()
    seconds, jobs = (int(re.findall(rf'"--{flag}", type=int, default=(\d+)', source)[0]) for flag in ("seconds", "jobs"))
    assert ("fuzz", str(-(-len(TARGETS) * seconds // jobs // 60))) in HELP
