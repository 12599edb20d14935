"""What the gate would say of the tests that a run of pytest skipped: the last lines of `make test`.

A reason may hold on a developer's machine, which lacks a program, and not on that of the gate, which installs it.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gate.outcomes import Outcome, Skips, too_many
from tests.gate.suites import SUITES

if TYPE_CHECKING:
    import pytest  # the gate itself runs without it


_INSTALLED = [download.skips for suite in SUITES for download in (*suite.uses, *suite.needs)]
_PREFIX = "Skipped: "


def permitted_skips() -> Mapping[str, Skips]:
    """Return by suite how many of its tests may be skipped for which reason."""
    permitted: Mapping[str, Skips] = tomllib.loads(Path(__file__).with_name("skips.toml").read_text())
    return permitted


def sentences(skips: Skips, permitted: Mapping[str, Skips]) -> list[str]:
    """Return a line for each reason of skips: that the gate permits it, that it installs what is missing, or that it fails."""
    everywhere = sum((Counter(suite) for suite in permitted.values()), Counter[str]())
    lines = []
    for reason, count in sorted(skips.items()):
        if any(re.search(pattern, reason) for pattern in _INSTALLED):
            lines.append(f"{count} × {reason} (the gate installs it and runs them)")
        elif too_many([Outcome("", skips={reason: count})], {"": everywhere}, []):
            lines.append(f"{count} × {reason} (THE GATE FAILS: {everywhere[reason]} are permitted by tests/gate/skips.toml)")
        else:
            lines.append(f"{count} × {reason} (permitted by tests/gate/skips.toml)")
    return lines


def skipped_tests(reports: Sequence[pytest.TestReport]) -> list[str]:
    """Return the sentences about the skipped tests of a run."""
    reasons = Counter(report.longrepr[2].removeprefix(_PREFIX) for report in reports if isinstance(report.longrepr, tuple))
    return sentences(reasons, permitted_skips())
