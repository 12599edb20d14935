"""`make bench`: the tables that a change to a hot path is measured by. Flags are those of `benchmarks.kserve`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("benchmarks.kserve", run_name="__main__", alter_sys=True)
