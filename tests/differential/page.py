"""Writes the table of accepted differences into `docs/migrating-from-triton.md`: `python -m tests.differential.page`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.differential.compare import accepted_differences

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-triton.md"
_TABLE = re.compile(r"(?<=<!-- differences: written by make docs -->\n)(.*?)(?=<!-- end of differences -->)", re.DOTALL)


def table() -> str:
    rows = [f"| {own.title} | {own.triton} | {own.here} | {own.why} |" for own in accepted_differences()]
    return "\n".join(["| | Triton | here | because |", "|---|---|---|---|", *rows, ""])


def written(page: str) -> str:
    """Return the page with the table as it should be."""
    return _TABLE.sub(lambda _: table(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
