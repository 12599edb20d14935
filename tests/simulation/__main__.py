"""`python -m tests.simulation`: run many seeds on all cores, or replay one.

    python -m tests.simulation --new 500                                    # seeds that were probably never run before
    python -m tests.simulation --seeds 0-19999 --results simulate.jsonl     # resumable: seeds in the file are not run again
    python -m tests.simulation --replay 17                                  # prints the whole history

Exit status 1 if an invariant does not hold, if a milestone was never reached in as many histories as always reach it, or if fewer
histories were run than `--at-least`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.simulation.clients import Outcome
from tests.simulation.milestones import Census

_PER_PROCESS = 10
"""Seeds that a process runs. What they leave behind goes with it, which takes less time than to collect it."""

_OUTCOMES = {
    Outcome.RIGHT: "the response was right",
    Outcome.CANCELLED: "the client left",
    Outcome.LOST: "allowed: its frontend was killed",
    Outcome.FAILED: "allowed: no instance could respond in time, the request was hostile, or messages were lost",
    Outcome.OPEN: "not allowed: it never ended",
    Outcome.WRONG: "not allowed: the response was wrong",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a history
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    if arguments.replay is not None:
        return _replay(arguments.replay, plain=arguments.plain)
    census = Census()
    done = _done(arguments.results, census)
    seeds = [seed for seed in _seeds(arguments.seeds, arguments.new) if seed not in done]
    return _run(seeds, arguments, census)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Run the fleet in simulated time.")
    parser.add_argument("--seeds", default="", help="FIRST-LAST or a list of seeds, separated by commas")
    parser.add_argument(
        "--new", type=int, default=0, metavar="COUNT", help="so many seeds from a random one on, in addition to --seeds"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", type=Path, help="a file of results, one JSON object per line, to which more are appended")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="start no more seeds after this many seconds")
    parser.add_argument(
        "--at-least", type=int, default=1, metavar="COUNT", help="run so many, however long they take; fewer are a failure"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its history")
    parser.add_argument("--plain", action="store_true", help="histories as they were before there were milestones")
    arguments = parser.parse_args(argv)
    if not arguments.seeds and not arguments.new and arguments.replay is None:
        parser.error("name seeds with --seeds, --new or --replay")
    return arguments


def _seeds(text: str, new: int) -> list[int]:
    seeds: list[int] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        seeds += range(int(first), int(last) + 1) if dash else [int(first)]
    if new:
        start = random.SystemRandom().randrange(10**6, 10**9)
        print(f"seeds {start}-{start + new - 1}", flush=True)
        seeds += range(start, start + new)
    return seeds


def _done(results: Path | None, census: Census) -> set[int]:
    """Return the seeds that were run before; add what they came to."""
    if results is None or not results.exists():
        return set()
    records = [json.loads(line) for line in results.read_text().splitlines()]
    for record in records:
        if "milestones" in record:  # not in files of older versions
            census.add(record["milestones"])
    return {record["seed"] for record in records}


def _replay(seed: int, *, plain: bool) -> int:
    from tests.simulation.history import run_history

    result = run_history(seed, plain=plain)
    print("\n".join(result.events))
    print(f"seed {seed}: {result.outcomes} in {result.virtual_s:.0f} s of virtual time")
    print("\n".join(f"{count:9} {name}" for name, count in sorted(result.milestones.items())))
    print("\n".join(f"VIOLATION  {violation}" for violation in result.violations))
    return 0 if result.is_good else 1


def _run(seeds: list[int], arguments: argparse.Namespace, census: Census) -> int:
    results: Path | None = arguments.results
    begun = time.monotonic()
    outcomes: Counter[str] = Counter()
    virtual_s, count, bad = 0.0, 0, []
    for line in _results(seeds, arguments):
        record = json.loads(line)
        count += 1
        virtual_s += record["virtual_s"]
        outcomes.update(record["outcomes"])
        census.add(record["milestones"])
        if results is not None:
            with results.open("a") as file:
                file.write(line + "\n")
        if record["violations"]:
            bad.append(record["seed"])
            print(f"seed {record['seed']}:", *record["violations"][:10], sep="\n    ", flush=True)
    took = time.monotonic() - begun
    print(f"{count} seeds, {sum(outcomes.values())} requests, {virtual_s / 60:.0f} virtual minutes in {took:.0f} s")
    print("\n".join([*summary(outcomes), *census.table()]))
    overdue = census.overdue()
    for milestone in overdue:
        print(f"expected within {milestone.within} histories: {milestone.name}")
    if overdue:
        print(f"{len(overdue)} milestones were not reached: the histories are not what they were")
    if bad:
        print(f"{len(bad)} broke an invariant; replay one with: python -m tests.simulation --replay {bad[0]}")
    too_few = census.histories < arguments.at_least  # with those of the file of results
    if too_few:
        print(f"too few: {census.histories} histories of at least {arguments.at_least}")
    return 1 if bad or overdue or too_few else 0


def summary(outcomes: Mapping[str, int]) -> list[str]:
    """Return a line for each outcome of requests, with its meaning and whether it is allowed; the most frequent one first."""
    counts = sorted(outcomes.items(), key=lambda item: -item[1])
    return [f"{count:9} {name:9} {_OUTCOMES[Outcome(name)]}" for name, count in counts]


def _results(seeds: list[int], arguments: argparse.Namespace) -> Iterator[str]:
    """Results as they come, in order, as JSON lines. As many as have to be run are, however long they take."""
    importlib.import_module("tests.simulation.history")  # before processes are forked, so that each one has it
    until = time.monotonic() + arguments.within_s
    starts = range(0, len(seeds), _PER_PROCESS)
    parts = [seeds[start : start + _PER_PROCESS] for start in starts]
    limits = [until if start >= arguments.at_least else float("inf") for start in starts]
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for lines in threads.map(partial(_run_seeds, plain=arguments.plain), parts, limits):
            yield from lines


def _run_seeds(seeds: list[int], until: float, *, plain: bool) -> list[str]:
    """Run seeds in a process of their own. Raises RuntimeError if it dies."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(seeds, until, plain, sender))
    process.start()
    sender.close()
    try:
        lines: list[str] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process of seeds {seeds} ended with status {process.exitcode}") from None
    process.join()
    return lines


def _child(seeds: list[int], until: float, plain: bool, sender: Connection) -> None:
    from tests.simulation.history import run_history

    lines = []
    for seed in seeds:
        if time.monotonic() > until:
            break
        result = run_history(seed, plain=plain, collect=False)
        record = {
            "seed": seed,
            "violations": result.violations,
            "outcomes": result.outcomes,
            "virtual_s": round(result.virtual_s, 1),
            "milestones": result.milestones,
        }
        lines.append(json.dumps(record))
    sender.send(lines)


if __name__ == "__main__":
    sys.exit(main())
