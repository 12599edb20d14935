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
    r"temporary failure|could not resolve|name or service not known|network is unreachable|no route to host"
    r"|failed to establish a new connection|connecttimeout|read timed out|connection (?:refused|reset|aborted|broken|timed out)"
    r"|max retries exceeded|remote end closed|incomplete ?read|failed to fetch|unable to (?:access|connect)"
    r"|(?:http error|returned error:) (?:403|407|429|5\d\d)|are you root\?|(?:apt-get|dpkg|git): (?:command )?not found",
    re.IGNORECASE,
)
_REPEATED = re.compile(r"^WARNING: Retrying \(Retry\(total=(\d+)")
"""What pip says when it tries again, and how often it still may."""
_UNKNOWN = re.compile(r"no matching distribution found for ([\w.-]+)", re.IGNORECASE)
"""What pip says of a package that its index does not have, and of one when the index cannot be reached."""
_MISTAKE = re.compile(
    r"conflicting dependencies|resolutionimpossible|cannot install .+ because|(?:error:?|http/\S+) 404|404 +not found"
    r"|repository .+ not found",
    re.IGNORECASE,
)

_MAX_CHARS = 400
_MAX_LINES = 20
"""How many lines say what failed in a suite."""


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
    """What failed, each on a line, and below it in lines of their own why."""

    def row(self) -> tuple[str, ...]:
        reasons = "; ".join(filter(None, (self.note, *(f"{count} × {reason}" for reason, count in self.skips.items()))))
        counts = (self.passed, self.failed, sum(self.skips.values()))
        return (self.suite, f"{self.seconds:.0f}", *map(str, counts), reasons)

    def why(self) -> list[str]:
        """Return what failed and, in the lines that remain of `_MAX_LINES`, the end of why."""
        shown = self.failures[:_MAX_LINES]
        lines = list[str]()
        for failure in shown:
            first, *details = failure.splitlines() or [""]
            rest = (_MAX_LINES - len(shown)) // len(shown)
            lines += [f"{self.suite}: {first}", *(f"    {line}" for line in details[len(details) - min(rest, len(details)) :])]
        more = len(self.failures) - len(shown)
        return [*lines, f"{self.suite}: {more} more"] if more else lines


def missing_download(output: str) -> str:
    """Return the line of a command's output that says what could not be downloaded; no text if it failed for another reason.

    A download that was repeated is no reason for requirements that conflict, and what the other end does not have is none at all.
    """
    lines = output.splitlines()
    if _MISTAKE.search(output):
        return ""
    if unknown := _UNKNOWN.search(output):
        page = f"/{re.sub(r'[-_.]+', '-', unknown[1]).lower()}/"
        return next((line for line in lines if page in line and _is_given_up(line)), "")
    return next((line for line in lines if _NO_DOWNLOAD.search(line) and not _REPEATED.search(line)), "")


def _is_given_up(line: str) -> bool:
    """Return whether a line says that something cannot be reached, and pip does not try once more."""
    repeated = _REPEATED.search(line)
    return bool(_NO_DOWNLOAD.search(line)) and (repeated is None or repeated[1] == "0")


def last_lines(output: str) -> str:
    """Return the end of a command's output, as what failed."""
    lines = [line[:_MAX_CHARS].rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join(["the end of its output:", *lines[1 - _MAX_LINES :]])


def by_report(report: str) -> tuple[int, Sequence[str], Skips]:
    """Return how many tests passed by pytest's report in XML, those that failed, and how many were skipped by the reason."""
    failures, skips, total = list[str](), Counter[str](), 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        total += 1
        failure = next((end for kind in ("failure", "error") if (end := case.find(kind)) is not None), None)
        if failure is not None:
            why = failure.get("message", "").partition("\n")[0]
            details = [line for line in (failure.text or "").splitlines() if line.strip()]
            lines = [f"{case.get('classname', '')}::{case.get('name', '')}: {why}", *details]
            failures.append("\n".join(line[:_MAX_CHARS] for line in lines))
        elif (skipped := case.find("skipped")) is not None:
            skips[skipped.get("message", "")] += 1
    return total - len(failures) - skips.total(), failures, skips


def by_lines(suite: Suite, output: str) -> tuple[int, int, Sequence[str]]:
    """Return how many cases passed and failed by the lines of a suite's output, and what it says of those that failed."""
    failed = _sum(suite.failures, output)
    reasons = [match[0] for match in re.finditer(suite.reasons, output, re.MULTILINE)]
    return max(0, _sum(suite.cases, output) - failed), failed, reasons


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
