"""`python -m tests.fuzz [TARGET …]`: fuzz decoders, guided by coverage.

Each target runs in a process of its own, for `--runs` inputs or `--seconds`, whichever ends first. Input that raises what it may
not is written to the target's folder in the corpus, where the tests find it again. Exit status 1 if there was one: then the last
lines are what each such input raised, where, and the input as Python writes it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
_ROOT = Path(__file__).parents[2]
_MAX_LINES = 8
"""How many lines of a traceback are shown at the end: those next to the defect."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz decoders, guided by coverage.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="of tests/fuzz/targets.py; all of them by default")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each target")
    parser.add_argument("--seconds", type=int, default=600, help="at most so long for each target")
    parser.add_argument("--seed", type=int, default=0, help="of mutations; with 0 each run has others")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument(
        "--collect", type=Path, help="a folder that keeps inputs that reach new code, for another run to begin with"
    )
    parser.add_argument("--in-process", action="store_true", help="fuzz the one target that is named, in this process")
    arguments = parser.parse_args(argv)
    if arguments.in_process:
        fuzz(arguments.targets[0], arguments)
    names = arguments.targets or sorted(path.name for path in CORPUS.iterdir() if path.is_dir())
    with ThreadPoolExecutor(arguments.jobs) as pool:
        defects = [defect for defect in pool.map(lambda name: run(name, arguments), names) if defect]
    for defect in defects:
        print(defect)
    return 1 if defects else 0


def run(name: str, arguments: argparse.Namespace) -> str:
    """Fuzz one target in a process of its own; return what was found, or no text."""
    limits = [f"--{name}={getattr(arguments, name)}" for name in ("runs", "seconds", "seed")]
    collect = [] if arguments.collect is None else ["--collect", str(arguments.collect)]
    command = [sys.executable, "-m", "tests.fuzz", name, "--in-process", *limits, *collect]
    environment = os.environ | {"PYTHONHASHSEED": str(arguments.seed or "random")}  # the order of sets is a part of the way
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    statistics = dict(re.findall(r"^stat::(\w+):\s+(\d+)$", done.stderr, re.M))
    inputs, rate = statistics.get("number_of_executed_units", "0"), statistics.get("average_exec_per_sec", "0")
    is_ok = done.returncode == 0 and inputs != "0"
    print(f"{name}: {'ok' if is_ok else 'FAILED'}; {inputs} inputs, {rate} a second", flush=True)
    if is_ok:
        return ""
    print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", flush=True)
    return described(name, done.stdout, done.stderr)


def described(name: str, stdout: str, stderr: str) -> str:
    """Return what a failed run found: the exception, its traceback, and a line of Python that raises it again."""
    raised = re.search(r"=== Uncaught Python exception: ===\n(.*?)\nTraceback [^\n]*\n(.*)", stdout, re.S)
    ended = re.search(r"^==\d+== ?(ERROR: .*)", stderr, re.M)
    if raised:
        why, frames = raised[1], raised[2].rstrip().removesuffix(raised[1]).replace(f"{_ROOT}/", "")
    elif ended:
        why, frames = ended[1], stdout
    else:
        why, frames = "it ended before it had an input", stderr
    first, *rest = why.splitlines()
    lines = [
        f"failed: {name}: {first}",
        *rest[:_MAX_LINES],
        *[line for line in frames.splitlines() if line.strip()][-_MAX_LINES:],
    ]
    if written := re.search(r"Test unit written to (.+)$", stderr, re.M):
        lines.append(f"TARGETS[{name!r}]({Path(written[1]).read_bytes()!r})")
    return "\n    ".join(lines)


def fuzz(name: str, arguments: argparse.Namespace) -> None:
    """Does not return."""
    import atheris

    with atheris.instrument_imports(include=["dynamo"]):
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        collected = (arguments.collect or Path(scratch)) / name
        collected.mkdir(parents=True, exist_ok=True)
        options = [f"-runs={arguments.runs}", f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}"]
        options += ["-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
        options += [f"-artifact_prefix={folder}/", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, str(collected), str(folder)], target)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
