"""The same requests to a real Triton and to this project, with the same model repository; the responses are compared.

    make differential                     in .venv-triton; TRITON=PATH names another environment with the package nvidia-pytriton

Prints a summary by family and every difference that `accepted.toml` does not explain. Exits with 1 if there is one, or if an
entry of that list explains nothing any more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from benchmarks.tritonserver import add_triton_flag, packages_of
from tests.differential.cases import Case, all_cases, named_once
from tests.differential.compare import (
    Difference,
    Part,
    accepted_differences,
    compare,
    explanation,
    first_difference,
    normalise,
)
from tests.differential.models import write_repository
from tests.differential.server_client import Response, ServerClient
from tests.differential.servers import Server, here, triton

Responses = Mapping[str, Response]
EQUAL, ACCEPTED = "equal", "accepted"


async def main(arguments: argparse.Namespace) -> int:
    every = named_once(all_cases())
    cases = [case for case in every if not arguments.case or any(fnmatchcase(case.name, own) for own in arguments.case)]
    accepted = accepted_differences()
    # A Triton that ends takes with it what it has counted and whatever it is asked at that moment, so what may end it comes last.
    cases.sort(key=lambda case: any(difference.may_end_triton(case.name) for difference in accepted))
    with tempfile.TemporaryDirectory(prefix="differential-") as folder:
        repository = Path(folder) / "models"
        models = write_repository(repository)
        expected = _recorded(arguments.recording)
        if not expected.keys() >= {case.name for case in cases}:
            expected = await _responses(partial(triton, arguments.packages, repository, models), cases)
            if arguments.recording is not None:
                arguments.recording.write_text(json.dumps({name: asdict(response) for name, response in expected.items()}))
        actual = await _responses(partial(here, repository, models), cases)
    outcomes: dict[str, str] = {}
    for case in cases:
        parts = compare(expected[case.name], actual[case.name])
        if not parts:
            outcomes[case.name] = EQUAL
        elif explanation(case.name, expected[case.name], parts, accepted) is not None:
            outcomes[case.name] = ACCEPTED
        else:
            outcomes[case.name] = next(part for part in Part if part in parts)
            _print_difference(case.name, parts, expected[case.name], actual[case.name])
    print(summary(cases, outcomes))
    unexplained = [name for name, outcome in outcomes.items() if outcome not in (EQUAL, ACCEPTED)]
    print(f"{len(unexplained)} requests differ")
    unused = [] if arguments.case else [difference for difference in accepted if not difference.count]
    for difference in unused:
        print(f"accepted.toml: {difference.title!r} explains nothing")
    _print_accepted(accepted)
    return int(bool(unused or unexplained))


async def _responses(start: Callable[[], AbstractAsyncContextManager[Server]], cases: Sequence[Case]) -> Responses:
    """Run all cases, with a new server after each that ends one."""
    responses: dict[str, Response] = {}
    while len(responses) < len(cases):
        async with start() as server:
            with ServerClient(server.grpc, server.http, server.metrics) as client:
                for case in cases[len(responses) :]:
                    response = await asyncio.to_thread(case.run, client)
                    if response.is_broken and await server.has_ended():
                        responses[case.name] = Response("ended", "the server ended")
                        print(f"the server ended: {case.name}", file=sys.stderr)
                        break
                    responses[case.name] = response
    return responses


def _recorded(recording: Path | None) -> Responses:
    if recording is None or not recording.exists():
        return {}
    return {name: Response(**fields) for name, fields in json.loads(recording.read_text()).items()}


def _print_difference(name: str, parts: frozenset[Part], expected: Response, actual: Response) -> None:
    print(f"{','.join(sorted(parts)):7} {name}")
    if parts & {Part.STATUS, Part.WORDS}:
        print(f"        Triton: {expected.status} {expected.words}")
        print(f"        here:   {actual.status} {actual.words}")
    else:
        body = first_difference(normalise(expected.body), normalise(actual.body))
        print(f"        {body or first_difference(expected.headers, actual.headers, 'headers')}")


def _print_accepted(accepted: Sequence[Difference]) -> None:
    for difference in accepted:
        print(f"accepted, {difference.count:4}: {difference.title}")


def summary(cases: Sequence[Case], outcomes: Mapping[str, str]) -> str:
    """Return a table: a row for each family, a column for each outcome."""
    columns = (EQUAL, ACCEPTED, *Part)
    counts: dict[str, Counter[str]] = {}
    for case in cases:
        counts.setdefault(case.family, Counter())[outcomes[case.name]] += 1
    total = sum(counts.values(), Counter[str]())
    lines = [f"{'family':22}{'cases':>7}" + "".join(f"{column:>10}" for column in columns)]
    for family, own in (*counts.items(), ("all", total)):
        lines.append(f"{family:22}{own.total():7}" + "".join(f"{own[column]:10}" for column in columns))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_triton_flag(parser)
    parser.add_argument("--case", metavar="PATTERN", action="append", help="run only the cases whose names match")
    parser.add_argument("--recording", metavar="FILE", type=Path, help="Triton's responses: read if there, else written")
    arguments = parser.parse_args()
    arguments.packages = packages_of(parser, arguments.triton)
    return arguments


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
