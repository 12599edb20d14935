"""`python -m benchmarks.long_prompts` runs, and no request of it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_brief_benchmark_serves_all_of_its_requests() -> None:
    command = [sys.executable, "-m", "benchmarks.long_prompts", "--brief"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert run.returncode == 0, run.stderr
    assert "| first token, at the rate | 20 |" in run.stdout
    assert "| CPU time | " in run.stdout
    assert "failed" not in run.stdout
