"""`python -m tests.drill [NAME …]`: what callers see of each fault, in real processes under load, as a table in Markdown.

Exit status 1 if a request failed that some live instance could have served, as one does without a response before its deadline,
if the fleet holds more afterwards than before, or if a frontend does not know exactly what workers have cached on each tier. That
a request took longer than its fault and two seconds is only printed: on a busy machine it does.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.drill.backends import clustered, single
from tests.drill.caches import Caches
from tests.drill.engines import UnexpectedResponse
from tests.drill.faults import FAULTS, Fault
from tests.drill.fleet import DrilledFleet, Held
from tests.drill.load import Load, expected_texts
from tests.support.waiting import WAIT_S

_GRACE_S = 2.0
_WARM_S = 3.0
_BEFORE_S = 2.0
_AFTER_S = 6.0
_MEMORY_GROWTH = 1.3
_COLUMNS = (
    *(
        "fault",
        "requests",
        "failed",
        "allowed to fail",
        "sent again by the client",
        "median",
        "longest",
        "longest pause of a stream",
    ),
    *("memory", "open files", "open requests", "free credit", "cached blocks by tier"),
)


@dataclass(frozen=True)
class Drilled:
    """What callers saw of one fault, and what the fleet held before and after."""

    fault: Fault
    load: Load
    before: Held
    after: Held
    caches: Caches
    """What was cached after it."""
    unexpected: str
    """What went wrong with the requests of the fault itself."""

    @property
    def failures(self) -> list[str]:
        return [failure for failure in self.load.failures if not self._is_allowed(failure)]

    def row(self) -> str:
        load, before, after = self.load, self.before, self.after
        cells = [
            *(self.fault.name, load.count, len(self.failures), len(load.failures) - len(self.failures), load.sent_again),
            f"{median(load.durations) * 1000:.1f} ms",
            *(f"{load.longest_s:.2f} s", f"{load.longest_silence_s:.2f} s"),
            f"{before.memory_mib} → {after.memory_mib} MiB",
            *(f"{before.files} → {after.files}", f"{before.open_requests} → {after.open_requests}"),
            f"{before.credit_mib} → {after.credit_mib} MiB",
            self.caches,
        ]
        return _line(cells)

    def broken_promises(self) -> Iterator[str]:
        if self.unexpected:
            yield self.unexpected
        yield from sorted(set(self.failures))[:3]
        yield from self.caches.differences
        if self.after.memory_mib > self.before.memory_mib * _MEMORY_GROWTH:
            yield f"memory grew from {self.before.memory_mib} to {self.after.memory_mib} MiB"
        if self.after.files > self.before.files + self.fault.more_files:
            yield f"open files grew from {self.before.files} to {self.after.files}"
        if self.after.open_requests:
            yield f"{self.after.open_requests} requests stayed open"
        if self.after.credit_mib < self.before.credit_mib:
            yield f"credit fell from {self.before.credit_mib} to {self.after.credit_mib} MiB"

    def delays(self) -> Iterator[str]:
        """Yield what took longer than the fault explains on a machine that does nothing else."""
        limit_s = self.fault.seconds + _GRACE_S
        if self.load.longest_s > limit_s:
            yield f"a request took {self.load.longest_s:.2f} s, more than {limit_s:g}"
        if self.load.longest_silence_s > limit_s:
            yield f"a stream paused for {self.load.longest_silence_s:.2f} s, more than {limit_s:g}"

    def _is_allowed(self, failure: str) -> bool:
        return bool(self.fault.may_fail) and failure.endswith(self.fault.may_fail)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description="What callers see of each fault.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="drill faults whose name contains one of these; by default all")
    parser.add_argument("--list", action="store_true", help="print the names of the faults, and drill none")
    parser.add_argument("--rate", type=float, default=60.0, help="tensor requests a second, over all frontends")
    parser.add_argument("--streams", type=int, default=4, help="text streams at once")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--frontends", type=int, default=2)
    arguments = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if not arguments.names or any(name in fault.name for name in arguments.names)]
    if not faults:
        parser.error(f"no fault's name contains {' or '.join(arguments.names)}; --list prints them")
    if arguments.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    return asyncio.run(_drill_all(faults, arguments))


async def _drill_all(faults: Sequence[Fault], arguments: argparse.Namespace) -> int:
    print(_line(_COLUMNS))
    print(_line("---" for _ in _COLUMNS))
    status = 0
    for fault in faults:
        try:
            drilled = await _drill(fault, arguments)
        except Exception as error:  # the other faults are drilled all the same
            sentences = [f"the drill did not end: {error!r}"]
        else:
            print(drilled.row(), flush=True)
            for delay in drilled.delays():
                print(f"slow: {fault.name}: {delay}", file=sys.stderr, flush=True)
            sentences = list(drilled.broken_promises())
        for sentence in sentences:
            print(f"not as promised: {fault.name}: {sentence}", file=sys.stderr, flush=True)
            status = 1
    return status


async def _drill(fault: Fault, arguments: argparse.Namespace) -> Drilled:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            (clustered if fault.is_clustered else single)(Path(folder)) as backends,
            DrilledFleet(backends, f"drill-{secrets.token_hex(4)}", fault.worker_flags) as fleet,
        ):
            await fleet.start(workers=arguments.workers, frontends=arguments.frontends)
            texts = await expected_texts(fleet, arguments.streams)
            await _run(Load(fleet, arguments.rate, texts), _WARM_S)
            before = await fleet.idle(WAIT_S)
            load = Load(fleet, arguments.rate, texts)
            unexpected = await _run(load, _BEFORE_S, fault)
            after = await fleet.idle(WAIT_S, before)
            return Drilled(fault, load, before, after, await fleet.compared(WAIT_S), unexpected)


async def _run(load: Load, seconds: float, fault: Fault | None = None) -> str:
    """Send load for `seconds`, then during the fault and after it; return what went wrong with the fault's own requests."""
    stop, unexpected = asyncio.Event(), ""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(stop))
        await asyncio.sleep(seconds)
        if fault is not None:
            try:
                await fault.act(load.fleet)
            except* UnexpectedResponse as errors:
                unexpected = str(errors.exceptions[0])
            await asyncio.sleep(_AFTER_S)
        stop.set()
    return unexpected


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
