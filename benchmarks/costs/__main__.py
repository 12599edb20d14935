"""`make costs`: see `command`. Before that, what could differ from run to run is taken away."""

from __future__ import annotations

import os
import sys

from benchmarks.costs import clock

_KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that Python may need to start; others would be read by libraries, such as that of the metrics."""
_OWN = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "DYNAMO_COSTS": "1"}
"""The order of sets of strings would count. The last tells that this process has only these variables."""


def main() -> int:
    if "DYNAMO_COSTS" not in os.environ:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _OWN
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.costs", *sys.argv[1:]], environment)
    clock.install()
    from benchmarks.costs.command import main as counted  # modules keep functions of `time` when they are imported

    return counted()


if __name__ == "__main__":
    sys.exit(main())
