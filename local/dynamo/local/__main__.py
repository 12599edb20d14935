"""`dynamo-local`, also `python -m dynamo.local`; its first word may name a tool: `dynamo-local top`."""

from __future__ import annotations

import importlib
import os
import sys

from dynamo.common.config import ConfigError, exit_with, load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging_or_exit
from dynamo.local.app import serve
from dynamo.local.config import PASSES_ON, LocalConfig
from dynamo.local.deployment import check_flags

PROGRAM = "dynamo-local"
TOOLS = {"top": "dynamo.local.top", "replay": "dynamo.local.replay.command"}
"""Each a module whose `main` takes the words after its name."""


def main() -> None:
    if sys.argv[1:] and (tool := TOOLS.get(sys.argv[1])):
        importlib.import_module(tool).main(sys.argv[2:])
    config = load_or_exit(LocalConfig, program=PROGRAM, passes_on=PASSES_ON)
    try:
        check_flags(config, os.environ)
    except ConfigError as error:
        exit_with(PROGRAM, error)
    setup_logging_or_exit(config.log, PROGRAM)
    sys.exit(run(serve(config), program=PROGRAM))


if __name__ == "__main__":
    main()
