"""`dynamo-planner`, and `python -m dynamo.planner`; its first word may be `explain`."""

from __future__ import annotations

import sys

from dynamo.common.config import load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging_or_exit
from dynamo.planner import app
from dynamo.planner.config import PlannerConfig
from dynamo.planner.process import explain

PROGRAM = "dynamo-planner"
EXIT_TIMEOUT_S = 5.0
"""A replay that is going on in a thread ends with the process this long after everything else."""


def main() -> None:
    if sys.argv[1:2] == ["explain"]:
        explain.main(sys.argv[2:])
        return
    config = load_or_exit(PlannerConfig, program=PROGRAM)
    setup_logging_or_exit(config.log, PROGRAM)
    run(app.run(config), program=PROGRAM, exit_timeout_s=EXIT_TIMEOUT_S)


if __name__ == "__main__":
    main()
