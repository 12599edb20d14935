"""`dynamo-local`, also `python -m dynamo.local`."""

from __future__ import annotations

import sys

from dynamo.common.config import load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging
from dynamo.local.app import serve
from dynamo.local.config import LocalConfig

PROGRAM = "dynamo-local"


def main() -> None:
    config = load_or_exit(LocalConfig, program=PROGRAM)
    setup_logging(config.log)
    sys.exit(run(serve(config), program=PROGRAM))


if __name__ == "__main__":
    main()
