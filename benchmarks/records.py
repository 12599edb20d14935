"""What it costs that nats-server syncs each record before it acknowledges it.

    python -m benchmarks.records

Responses, files and batches are such records: the store of a frontend writes them, into a nats-server on this machine's disk.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import uvloop

from dynamo.common.messaging.jetstream.records import RecordStore, open_records
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.local.servers import NatsServer

SMALL_BYTES, LARGE_BYTES = 2_000, 1 << 20
AT_ONCE = 32


@asynccontextmanager
async def store(fsync: bool) -> AsyncIterator[RecordStore]:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder), fsync=fsync)
        await server.start()
        try:
            async with (
                connect_nats(NatsOptions(servers=(server.url,)), "benchmark") as nats,
                open_records(nats, "records", ttl_s=600, max_bytes=1 << 30) as records,
            ):
                yield records
        finally:
            await server.stop()


async def durations_ms(records: RecordStore, prefix: str, count: int, size: int) -> list[float]:
    """Write records one after the other; return how long each took."""
    durations = []
    for number in range(count):
        began = perf_counter()
        await records.put(f"{prefix}.{number}", secrets.token_bytes(size), last=0)
        durations.append((perf_counter() - began) * 1e3)
    return durations


async def measure(count: int) -> None:
    print(f"| fsync | {SMALL_BYTES} bytes: median | {AT_ONCE} at once | {LARGE_BYTES >> 20} MiB: median |")
    print("| --- | --- | --- | --- |")
    for fsync in (False, True):
        async with store(fsync) as records:
            await durations_ms(records, "warm", 20, SMALL_BYTES)
            small = await durations_ms(records, "small", count, SMALL_BYTES)
            began = perf_counter()
            await asyncio.gather(*(durations_ms(records, f"many-{n}", count // AT_ONCE, SMALL_BYTES) for n in range(AT_ONCE)))
            rate = AT_ONCE * (count // AT_ONCE) / (perf_counter() - began)
            large = await durations_ms(records, "large", count // 50, LARGE_BYTES)
        cells = (f"{median(small):.1f} ms", f"{rate:,.0f} a second", f"{median(large):.0f} ms")
        print(f"| {'each record' if fsync else 'every 2 minutes'} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    uvloop.run(measure(parser.parse_args().count))


if __name__ == "__main__":
    main()
