"""A frontend that records how late its event loop is: `python -m benchmarks.long_prompts.timed_frontend RECORD [FLAGS]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.long_prompts.turns import record_turns
from dynamo.common.config import load
from dynamo.common.lifecycle import run
from dynamo.common.logs import setup_logging
from dynamo.common.process.background import running
from dynamo.frontend import app
from dynamo.frontend.config import FrontendConfig


async def serve(config: FrontendConfig, record: Path) -> None:
    async with running(record_turns(record), "turns"):
        await app.run(config)


if __name__ == "__main__":
    options = load(FrontendConfig, sys.argv[2:], os.environ, program="timed_frontend")
    setup_logging(options.log)
    run(serve(options, Path(sys.argv[1])))
