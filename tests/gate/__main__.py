"""`python -m tests.gate [SUITE …]`: run all suites, or those named, and print what became of them.

Needs Python 3.11, make and git; it sets up everything else itself. Exit status 1 if a test failed, if a suite that was due did
not run (unless what it needs could not be downloaded), or if more tests were skipped than skips.toml permits.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gate.commands import Commands, Finished
from tests.gate.outcomes import Outcome, Skips, by_lines, by_report, closing_line, last_lines, missing_download, table, too_many
from tests.gate.skips import permitted_skips
from tests.gate.suites import SETUP, SUITES, Download, Suite

LIMIT_S = 80 * 60
"""After so long nothing is begun any more, and what runs is ended: CI ends the gate itself after 90 minutes."""
_WITH_WARNINGS = {"PIP_VERBOSE": "1"}
"""With `-qq`, the Makefile's, pip does not say that it could not reach its index."""

Run = Callable[[str, float, Mapping[str, str]], Finished]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Had:
    """What became of a download."""

    error: str = ""
    is_mistake: bool = False
    """Whether it failed for another reason than that it could not be had."""
    output: str = ""
    """What the command printed, if it failed."""


class Gate:
    """Runs suites one after the other, each with the downloads that it needs."""

    def __init__(self, run: Run, had: Callable[[Download, float], Had], clock: Clock, limit_s: float = LIMIT_S) -> None:
        self._run, self._had, self._clock = run, had, clock
        self._begun, self._limit_s = clock(), limit_s
        self.outcomes: list[Outcome] = []
        self.excused: list[str] = []
        """Patterns of the reasons of skips for which a download is missing."""

    def run(self, suites: Sequence[Suite]) -> bool:
        """Run suites in their order; return whether all of them may still be followed by others."""
        for number, suite in enumerate(suites):
            outcome = self._outcome(suite)
            self.outcomes.append(outcome)
            print(table([outcome]).splitlines()[1], flush=True)
            if suite.is_first and outcome.failed:
                self.outcomes += (
                    Outcome(rest.name, note=f"not run, after a failure of {suite.name}") for rest in suites[number + 1 :]
                )
                return False
        return True

    def verdict(self, permitted: Mapping[str, Skips]) -> tuple[str, int]:
        """Return the last lines of the gate, and its exit status."""
        grown = too_many(self.outcomes, permitted, self.excused)
        outcomes = [*self.outcomes, *([Outcome("skips", failed=len(grown), note="more than are permitted")] if grown else [])]
        failures = [line for outcome in outcomes for line in outcome.why()]
        lines = [*grown, *failures, "", table(outcomes), closing_line(outcomes, self._clock() - self._begun)]
        return "\n".join(lines), int(any(outcome.failed for outcome in outcomes))

    def _outcome(self, suite: Suite) -> Outcome:
        hads = {needed: self._had(needed, self._left_s()) for needed in suite.needs}
        self._look_for_tools(suite)
        if self._left_s() <= 0:
            return Outcome(suite.name, failed=1, note=f"did not run: the gate's {self._limit_s / 60:.0f} minutes were over")
        for needed, had in hads.items():
            if had.is_mistake:
                note = f"did not run: {needed.name} cannot be installed: {had.error}"
                return Outcome(suite.name, failed=1, note=note, failures=[last_lines(had.output)])
            if had.error:
                reason = f"{needed.name} could not be downloaded: {had.error}"
                self.excused.append(re.escape(reason))
                return Outcome(suite.name, skips={reason: 1})
        return self._proof(suite)

    def _proof(self, suite: Suite) -> Outcome:
        begun = self._clock()
        with tempfile.TemporaryDirectory(prefix="gate-") as folder:
            report = Path(folder) / "report.xml"
            env = {"PYTEST_ADDOPTS": f"--junitxml={report}", "HELM_PYTHON": helm()}
            finished = self._run(suite.command, min(suite.limit_s, self._left_s()), env)
            skips: Skips = {}
            if suite.cases:
                passed, failed, failures = by_lines(suite, finished.output)
            else:
                passed, failures, skips = by_report(report.read_text() if report.exists() else "<none/>")
                failed = len(failures)
        outcome = self._judged(finished, Outcome(suite.name, self._clock() - begun, passed, failed, skips, failures=failures))
        if outcome.failed and (finished.status is None or not outcome.failures):
            return replace(outcome, failures=[*outcome.failures, last_lines(finished.output)])
        return outcome

    @staticmethod
    def _judged(finished: Finished, outcome: Outcome) -> Outcome:
        """Return the outcome of a suite with how it ended, which may be a failure as well."""
        if finished.status is None:
            return replace(outcome, failed=outcome.failed + 1, note="hung, and was ended")
        if finished.status != 0 and not outcome.failed:
            return replace(outcome, failed=1, note=f"ended with status {finished.status}")
        if finished.status == 0 and not outcome.passed:
            return replace(outcome, failed=outcome.failed + 1, note="ran nothing")
        return outcome

    def _look_for_tools(self, suite: Suite) -> None:
        for used in suite.uses:
            had = self._had(used, self._left_s())
            if had.error and not had.is_mistake:
                print(f"{used.name} could not be downloaded: {had.error}", flush=True)
                self.excused.append(used.skips)

    def _left_s(self) -> float:
        return self._begun + self._limit_s - self._clock()


class Downloads:
    """Downloads things one after the other, in the background, in the order in which suites want them."""

    def __init__(self, commands: Commands, pool: ThreadPoolExecutor) -> None:
        self._commands, self._pool = commands, pool
        self._futures: dict[Download, Future[Had]] = {}

    def begin(self, suites: Sequence[Suite]) -> None:
        for download in dict.fromkeys(each for suite in suites for each in (*suite.uses, *suite.needs)):
            self._futures[download] = self._pool.submit(self._fetch, download)

    def result(self, download: Download, left_s: float) -> Had:
        try:
            return self._futures[download].result(max(0.0, left_s))
        except Late:
            return Had("it was not there in time")

    def _fetch(self, download: Download) -> Had:
        finished = self._commands.run(download.command, download.limit_s, _WITH_WARNINGS, in_background=True)
        if finished.status == 0:
            return Had()
        print(f"{download.name}: {download.command}\n{finished.output}", flush=True)
        missing = missing_download(finished.output)
        if finished.status is None:
            return Had(missing or f"not within {download.limit_s:.0f} s", is_mistake=not missing, output=finished.output)
        return Had(missing or f"status {finished.status}", is_mistake=not missing, output=finished.output)


def helm() -> str:
    """Return the Python that has Helm's renderer; no text if there is none."""
    python = Path(".venv-helm/bin/python").absolute()
    return str(python) if Path(".venv-helm/.made").exists() else ""


def main(names: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    suites = [suite for suite in SUITES if not names or suite.name in names]
    if unknown := set(names) - {suite.name for suite in suites}:
        print("no such suite:", *sorted(unknown), file=sys.stderr)
        return 2
    with ThreadPoolExecutor(1) as pool, Commands() as commands:
        downloads = Downloads(commands, pool)
        gate = Gate(commands.run, downloads.result, time.monotonic)
        if gate.run([SETUP]):
            downloads.begin(suites)
            gate.run(suites)
            pool.shutdown(wait=False, cancel_futures=True)
        text, status = gate.verdict(permitted_skips())
    print(text, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
