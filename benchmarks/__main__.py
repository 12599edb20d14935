"""`make bench FLAGS="[NAME] [FLAGS]"`: the tables that a change to a hot path is measured by.

NAME is a benchmark, with flags of its own (`make bench FLAGS="http --help"`). Without it all but `models`, `soak`, `events`,
`paused_frontend`, `long_prompts`, `remote_text`, `picker`, `batch`, `tiers` and `triton` run, one after the other;
flags for all:
`make bench FLAGS=--help`.
`--triton PATH` runs `triton` alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

from dynamo.common.process.interpreter import interpreter

NAMES = (
    "bus",
    "kserve",
    "http",
    "router_trace",
    "router_scale",
    "fleet_scale",
    "router_peer",
    "models",
    "soak",
    "events",
    "paused_frontend",
    "long_prompts",
    "remote_text",
    "picker",
    "batch",
    "tiers",
    "triton",
)
_TIMED = ("kserve", "http", "router_peer")
"""Benchmarks that run in rounds of some seconds, and next to the peer if there is one."""


def main(arguments: list[str]) -> int:
    """Exit status: 0 if every benchmark ran to its end."""
    print(f"{interpreter()}, {os.cpu_count()} processors", flush=True)
    if arguments[:1] and arguments[0] in NAMES:
        return _run(arguments[0], arguments[1:])
    if "--triton" in (argument.partition("=")[0] for argument in arguments):
        return _run("triton", arguments)
    failed = []
    for name, flags in _all(arguments):
        print(f"\n## {name}\n", flush=True)
        if _run(name, flags):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _all(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """What to run, with the flags that each understands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, usage="%(prog)s [NAME] [FLAGS]")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has NVIDIA Dynamo installed, to measure beside it")
    parser.add_argument("--rounds", help="number of rounds, for benchmarks that run in rounds")
    parser.add_argument("--seconds", help="per case, system and round, in place of their own number")
    parser.add_argument("--triton", metavar="PATH", help="run only the comparison with the tritonserver of this environment")
    parser.add_argument("--trace", metavar="FILE", help="for router_trace; otherwise one is made up")
    parser.add_argument("--entries", help="for router_scale: (block, instance) pairs in the index")
    options = parser.parse_args(arguments)
    timed = [f"--{name}={value}" for name in ("peer", "rounds", "seconds") if (value := getattr(options, name))]
    flags = {
        "bus": [],
        **dict.fromkeys(_TIMED, timed),
        "router_trace": [options.trace] if options.trace else [],
        "fleet_scale": [],
        "router_scale": [f"--entries={options.entries}"] if options.entries else [],
    }
    return ((name, flags[name]) for name in NAMES if name in flags)


def _run(name: str, flags: list[str]) -> int:
    """In a process of its own: nothing that one leaves behind slows the next one down."""
    return subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *flags], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
