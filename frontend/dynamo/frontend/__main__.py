"""`dynamo-frontend`, and `python -m dynamo.frontend`."""

from __future__ import annotations

import sys

from dynamo.common.config import ConfigError, exit_with, load_or_exit
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging_or_exit
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.grafana import write_dashboards

PROGRAM = "dynamo-frontend"


def main() -> None:
    config = load_or_exit(FrontendConfig, program=PROGRAM)
    setup_logging_or_exit(config.log, PROGRAM)
    if config.grafana_folder is not None:
        try:
            write_dashboards(config.grafana_folder, config.grafana, config.prometheus)
        except ConfigError as error:
            exit_with(PROGRAM, error)
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
