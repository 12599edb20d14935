"""`dynamo-frontend`, and `python -m dynamo.frontend`."""

from __future__ import annotations

import sys

from dynamo.common.config import ConfigError, exit_with, load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging
from dynamo.frontend.config import FrontendConfig

PROGRAM = "dynamo-frontend"


def main() -> None:
    config = load_or_exit(FrontendConfig, program=PROGRAM)
    setup_logging(config.log)
    if config.processes > 1:
        from dynamo.frontend.processes import supervise

        try:
            sys.exit(supervise(config, PROGRAM))
        except ConfigError as error:
            exit_with(PROGRAM, error)
    from dynamo.frontend import app

    run(app.run(config), program=PROGRAM)


if __name__ == "__main__":
    main()
