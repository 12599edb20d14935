"""Pages promise the minutes that `make help` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/testing.md"]
PROMISE = re.compile(r"make (unit|integration|test|slow|test-all)\b(?![-=])[^\n()]*\((\d+) minutes\)")


def minutes_in(text: str) -> set[tuple[str, str]]:
    return set(PROMISE.findall(text))


def test_make_help_says_of_each_size_how_long_it_takes() -> None:
    assert sorted(target for target, _ in minutes_in((ROOT / "Makefile").read_text())) == [
        "integration",
        "slow",
        "test",
        "test-all",
        "unit",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_promises_the_minutes_that_make_help_does(page: str) -> None:
    promised = minutes_in((ROOT / page).read_text())
    assert "test" in {target for target, _ in promised}
    assert promised <= minutes_in((ROOT / "Makefile").read_text())
