"""`dynamo-local replay` under the name of a benchmark: `python -m benchmarks.router_trace TRACE --modes round-robin,kv`."""

from __future__ import annotations

import sys

from dynamo.local.replay.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
