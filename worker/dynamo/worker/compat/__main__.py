"""`python -m dynamo.worker.compat worker.py [ARGUMENTS]`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import dynamo
from dynamo.worker.compat import llm, runtime


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m dynamo.worker.compat worker.py [ARGUMENTS]")
    stand_in()
    del sys.argv[0]
    script = Path(sys.argv[0])
    if not script.is_file():
        raise SystemExit(f"dynamo.worker.compat: there is no file {script}")
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def stand_in() -> None:
    """Make `dynamo.llm` and `dynamo.runtime` the modules of this package."""
    logging = ModuleType("dynamo.runtime.logging")
    logging.__dict__["configure_dynamo_logging"] = runtime.configure_dynamo_logging
    for name, module in (("llm", llm), ("runtime", runtime)):
        sys.modules[f"dynamo.{name}"] = module
        setattr(dynamo, name, module)
    sys.modules["dynamo.runtime.logging"] = logging


if __name__ == "__main__":
    main()
