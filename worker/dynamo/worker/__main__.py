"""`dynamo-worker`, and `python -m dynamo.worker`."""

from __future__ import annotations

from dynamo.common.config import load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging_or_exit
from dynamo.worker import app
from dynamo.worker.config import WorkerConfig

PROGRAM = "dynamo-worker"
EXIT_TIMEOUT_S = 5.0
"""Threads of a model that are stuck end with the process this long after everything else."""


def main() -> None:
    config = load_or_exit(WorkerConfig, program=PROGRAM)
    setup_logging_or_exit(config.log, PROGRAM)
    run(app.run(config), program=PROGRAM, exit_timeout_s=EXIT_TIMEOUT_S)


if __name__ == "__main__":
    main()
