"""`python -m tests.drill [NAME …]`: what callers see of each fault, in real processes under load.

Exit status 1 if a request failed that some live instance could have answered, or took longer than its fault and two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.drill.faults import FAULTS, Fault
from tests.drill.fleet import DrilledFleet, Load, resources
from tests.support.servers import start_etcd, start_nats

_GRACE_S = 2.0
_BEFORE_S = 2.0
_AFTER_S = 6.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description="What callers see of each fault.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="drill faults whose name contains one of these; by default all")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second, over all frontends")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--frontends", type=int, default=2)
    arguments = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if not arguments.names or any(name in fault.name for name in arguments.names)]
    return asyncio.run(drill(faults, arguments))


async def drill(faults: Sequence[Fault], arguments: argparse.Namespace) -> int:
    print("| fault | requests | failed | sent again by the client | median | longest | memory of frontends | open files |")
    print("|---|---|---|---|---|---|---|---|")
    bad = [fault.name for fault in faults if not await _drill(fault, arguments)]
    for name in bad:
        print(f"not as promised: {name}", file=sys.stderr)
    return 1 if bad else 0


async def _drill(fault: Fault, arguments: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            start_etcd(Path(folder) / "etcd") as etcd,
            start_nats(Path(folder) / "nats") as nats,
            DrilledFleet(etcd, nats, f"drill-{secrets.token_hex(4)}", ("--model", "echo")) as fleet,
        ):
            await fleet.start(workers=arguments.workers, frontends=arguments.frontends)
            load, stop = Load(fleet, arguments.rate), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run(stop))
                await asyncio.sleep(_BEFORE_S)
                before = _resources(fleet)
                await fault.act(fleet)
                await asyncio.sleep(_AFTER_S)
                stop.set()
            after = _resources(fleet)
    is_good = not load.failures and load.longest_s <= fault.seconds + _GRACE_S
    print(
        f"| {fault.name} | {load.count} | {len(load.failures)} | {load.excused} | {median(load.durations) * 1000:.1f} ms "
        f"| {load.longest_s:.2f} s | {before[0] // 1024} → {after[0] // 1024} MiB | {before[1]} → {after[1]} |",
        flush=True,
    )
    for failure in load.failures[:3]:
        print(f"    {failure}", file=sys.stderr)
    return is_good


def _resources(fleet: DrilledFleet) -> tuple[int, int]:
    """Memory and open files of all frontends together."""
    usages = [resources(frontend.process.process.pid) for frontend in fleet.frontends]
    return sum(rss for rss, _ in usages), sum(files for _, files in usages)


if __name__ == "__main__":
    sys.exit(main())
