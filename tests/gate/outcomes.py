"""What became of suites: counts, skipped tests by their reason, the table, and the closing line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from tests.gate.suites import Suite

Skips = Mapping[str, int]
"""How many tests were skipped, by the reason."""

_NO_DOWNLOAD = re.compile(
    r"temporary failure in name resolution|could not resolve|network is unreachable|connecttimeout|read timed out"
    r"|connection (?:refused|reset|aborted|broken|timed out)|max retries exceeded|remote end closed|incomplete ?read"
    r"|from versions: none|failed to fetch|unable to (?:access|locate package|connect)|http error \d|returned error: \d"
    r"|are you root\?|(?:apt-get|dpkg|git): (?:command )?not found",
    re.IGNORECASE,
)
_MISTAKE = re.compile(r"conflicting dependencies|resolutionimpossible|cannot install .+ because", re.IGNORECASE)

_MAX_REASON_CHARS = 400
_MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a suite."""

    suite: str
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skips: Skips = field(default_factory=dict)
    note: str = ""
    failures: Sequence[str] = ()
    """What failed, one line each: tests with the first line of why, or the lines in which a suite says so."""

    def row(self) -> tuple[str, ...]:
        reasons = "; ".join(filter(None, (self.note, *(f"{count} × {reason}" for reason, count in self.skips.items()))))
        counts = (self.passed, self.failed, sum(self.skips.values()))
        return (self.suite, f"{self.seconds:.0f}", *map(str, counts), reasons)


def missing_download(output: str) -> str:
    """Return the line of a command's output that says what could not be downloaded; no text if it failed for another reason.

    A download that was repeated is no reason for requirements that conflict.
    """
    return "" if _MISTAKE.search(output) else next(filter(_NO_DOWNLOAD.search, output.splitlines()), "")


def by_report(report: str) -> tuple[int, Sequence[str], Skips]:
    """Return how many tests passed by pytest's report in XML, those that failed, and how many were skipped by the reason."""
    failures, skips, total = list[str](), Counter[str](), 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        total += 1
        failure = next((end for kind in ("failure", "error") if (end := case.find(kind)) is not None), None)
        if failure is not None:
            why = failure.get("message", "").partition("\n")[0][:_MAX_REASON_CHARS]
            failures.append(f"{case.get('classname', '')}::{case.get('name', '')}: {why}")
        elif (skipped := case.find("skipped")) is not None:
            skips[skipped.get("message", "")] += 1
    return total - len(failures) - skips.total(), failures, skips


def by_lines(suite: Suite, output: str) -> tuple[int, int, Sequence[str]]:
    """Return how many cases passed and failed by the lines of a suite's output, and what it says of those that failed."""
    failed = _sum(suite.failures, output)
    reasons = [" ".join(text.split()) for text in re.findall(suite.reasons, output, re.MULTILINE)]
    return max(0, _sum(suite.cases, output) - failed), failed, [reason[:_MAX_REASON_CHARS] for reason in reasons[:_MAX_REASONS]]


def _sum(pattern: str, output: str) -> int:
    texts = re.findall(pattern, output, re.MULTILINE)
    numbers = [int(text) for text in texts if text.isdigit()]
    return sum(numbers) + len({text for text in texts if not text.isdigit()})


def too_many(outcomes: Sequence[Outcome], permitted: Mapping[str, Skips], excused: Sequence[str]) -> list[str]:
    """Return a sentence for each reason with which a suite skipped more tests than are permitted.

    Those are `excused` whose reason matches one of these patterns: what the tests need could not be downloaded.
    """
    return [
        f"{outcome.suite}: {count} tests are skipped and {allowed} are permitted: {reason}"
        for outcome in outcomes
        for reason, count in outcome.skips.items()
        if count > (allowed := permitted.get(outcome.suite, {}).get(reason, 0))
        if not any(re.search(pattern, reason) for pattern in excused)
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("suite", "seconds", "passed", "failed", "skipped", "reason"), *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:]), row[5])).rstrip() for row in rows)


def closing_line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the line with which pytest would close a run of all suites."""
    counts = {
        "failed": sum(outcome.failed for outcome in outcomes),
        "passed": sum(outcome.passed for outcome in outcomes),
        "skipped": sum(sum(outcome.skips.values()) for outcome in outcomes),
    }
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests ran"
    hours, rest = divmod(round(seconds), 3600)
    return f" {said} in {seconds:.2f}s ({hours}:{rest // 60:02}:{rest % 60:02}) ".center(80, "=")
