"""What one NATS message costs a process: through the request plane's connection, and through nats-py alone.

    python -m benchmarks.bus [--rounds 3]

A process sends messages to itself over a real nats-server: one after the other, or 16 in one turn of the event loop. The figures
are CPU time of the process per message, sent and received; the smallest of all rounds, since a busy machine only adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
import uvloop
from nats.aio.msg import Msg

from benchmarks.measuring import table
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.local.servers import NatsServer

SIZES = (64, 1024, 65_536, 900_000)
BURSTS = (1, 16)
_BYTES = 64 * 2**20
"""Moved per figure at most."""
SUBJECT = "benchmark"


@dataclass(slots=True)
class Receiver:
    """Wakes the sender when a burst has arrived."""

    missing: int = 0
    arrived: asyncio.Future[None] | None = None

    def received(self) -> None:
        self.missing -= 1
        if not self.missing and self.arrived is not None:
            self.arrived.set_result(None)

    def expect(self, count: int) -> asyncio.Future[None]:
        self.missing = count
        self.arrived = asyncio.get_running_loop().create_future()
        return self.arrived


Send = Callable[[bytes], Awaitable[object] | object]


@asynccontextmanager
async def through_our_connection(url: str, receiver: Receiver) -> AsyncIterator[Send]:
    async with connect_nats(NatsOptions(servers=(url,)), "benchmark") as connection:
        await connection.subscribe(SUBJECT, lambda subject, reply, payload, gone: receiver.received())
        yield lambda body: connection.publish_nowait(SUBJECT, [body])


@asynccontextmanager
async def through_nats_py(url: str, receiver: Receiver) -> AsyncIterator[Send]:
    async def on_message(message: Msg) -> None:
        receiver.received()

    client = await nats.connect(url)
    await client.subscribe(SUBJECT, cb=on_message)
    await client.flush()
    try:
        yield lambda body: client.publish(SUBJECT, body)
    finally:
        await client.close()


async def cpu_us(send: Send, receiver: Receiver, size: int, burst: int) -> float:
    """Return microseconds of CPU time per message."""
    body = bytes(size)
    bursts = max(8, min(4_000, _BYTES // size) // burst)
    begun = time.process_time()
    for _ in range(bursts):
        arrived = receiver.expect(burst)
        for _ in range(burst):
            sent = send(body)
            if isinstance(sent, Awaitable):
                await sent
        await arrived
    return (time.process_time() - begun) / bursts / burst * 1e6


async def measure(rounds: int) -> str:
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-bus-") as folder:
        server = NatsServer(Path(folder))
        await server.start()
        try:
            for burst in BURSTS:
                for size in SIZES:
                    least = {}
                    for way in (through_our_connection, through_nats_py):
                        receiver = Receiver()
                        async with way(server.url, receiver) as send:
                            least[way] = min([await cpu_us(send, receiver, size, burst) for _ in range(rounds)])
                    ours, theirs = least.values()
                    rows.append([str(burst), f"{size:,}", f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}"])
        finally:
            await server.stop()
    return table(["messages at once", "bytes", "ours, µs", "nats-py, µs", "nats-py over ours"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    print(uvloop.run(measure(parser.parse_args().rounds)))
