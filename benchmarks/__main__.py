"""`make bench FLAGS="[WHAT] [FLAGS]"`: the tables that a change to a hot path is measured by.

WHAT is a benchmark's name, each with flags of its own (`make bench FLAGS="http --help"`). Without it: `kserve`, then `http`.
"""

import runpy
import sys

NAMES = ("kserve", "http", "router_trace", "router_scale", "router_peer", "soak")


def main(arguments: list[str]) -> None:
    chosen = arguments[:1] if arguments[:1] and arguments[0] in NAMES else ["kserve", "http"]
    flags = arguments[1:] if arguments[:1] == chosen else arguments
    for name in chosen:
        sys.argv = [f"benchmarks.{name}", *flags]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
