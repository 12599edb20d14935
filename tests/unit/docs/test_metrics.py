"""The page about metrics and the metrics themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_tables_of_metrics_are_what_the_code_says() -> None:
    command = [sys.executable, str(DOCS / "make_metrics.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stderr
