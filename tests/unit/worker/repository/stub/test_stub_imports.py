"""What the process of a Python model imports before its model."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import dynamo.worker.repository.stub.process
print(sorted({"asyncio", "ssl", "google", "grpc"} & sys.modules.keys()))
"""


def test_a_stub_imports_nothing_that_only_some_models_need() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
