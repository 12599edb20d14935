"""The supervisor of several frontend processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynamo.common.process.ports import free_ports

SUPERVISE = """
import multiprocessing, os, signal, sys
from dynamo.frontend.config import FrontendConfig, HttpOptions
from dynamo.frontend.processes import supervise

class Child(multiprocessing.get_context("spawn").Process):
    count = 0
    def start(self):
        Child.count += 1
        print(Child.count, flush=True)
        if Child.count == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGTERM)  # its handler runs before the child is known
        super().start()

multiprocessing.get_context("spawn").__class__.Process = Child
if __name__ == "__main__":
    sys.exit(supervise(FrontendConfig(processes=3, http=HttpOptions(port=int(sys.argv[2]))), "dynamo-frontend"))
"""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_signal_that_comes_while_children_are_started_ends_all_of_them(number: int) -> None:
    [port] = free_ports(1)
    command = [sys.executable, "-c", SUPERVISE, str(number), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.returncode) == ([str(count) for count in range(1, number + 1)], 0), done.stderr
