"""Thousands of streams at a frontend that stops for some seconds: does nats-server cut its connection?

    python -m benchmarks.paused_frontend --streams 20000 --pause 3

One process has the frontend's side of the request plane and reads all streams; others have the workers' side. Responses come at
`--interval` until the frontend is stopped (SIGSTOP); from then on every stream sends as much as its credit allows after its
next response, as with the fastest of engines. nats-server cuts a connection for which 64 MiB wait, its default.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import uvloop

from dynamo.common.errors import DynamoError
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.local.servers import NatsServer

ENDPOINT = Endpoint()
PROCESSES = 2
MAX_OPEN = 4000
"""Streams per instance, which takes 4,096."""
TIMEOUT_S = 240.0


@dataclass(slots=True)
class Report:
    """What the frontend has seen."""

    responses: int
    closed: int
    reconnects: int
    error: str


class NatsClient(msgspec.Struct):
    """A connection, as nats-server's monitor shows it, in part."""

    name: str = ""
    pending_bytes: int = 0


class Monitor(msgspec.Struct):
    connections: list[NatsClient]


def instances(streams: int) -> list[InstanceId]:
    return [InstanceId(number + 1) for number in range(max(PROCESSES, -(-streams // MAX_OPEN)))]


def run_worker(url: str, ids: list[InstanceId], size: int, interval_s: float, flood: Event) -> None:
    uvloop.run(work(url, ids, size, interval_s, flood))


async def work(url: str, ids: list[InstanceId], size: int, interval_s: float, flood: Event) -> None:
    body = bytes(size)

    async def respond(request: Incoming) -> None:
        while True:
            if not request.send_nowait(body):
                await request.ready()
            await asyncio.sleep(0 if flood.is_set() else interval_s)

    async with AsyncExitStack() as stack:
        for id_ in ids:
            nats = await stack.enter_async_context(connect_nats(NatsOptions(servers=(url,)), "worker"))
            await stack.enter_async_context(serve_requests(nats, ENDPOINT, id_, {"generate": respond}))
        await asyncio.Event().wait()


def run_frontend(url: str, streams: int, pipe: Pipe) -> None:
    uvloop.run(read_all(url, streams, pipe))


async def read_all(url: str, streams: int, pipe: Pipe) -> None:
    ids = instances(streams)
    counts, errors, reconnects = [0] * streams, list[str](), 0
    async with connect_nats(NatsOptions(servers=(url,)), "frontend") as nats, open_client(nats, ENDPOINT.namespace) as client:

        def reconnected() -> None:
            nonlocal reconnects
            reconnects += 1

        async def read(number: int) -> None:
            id_ = ids[number % len(ids)]
            try:
                async with client.open(id_, ENDPOINT.rpc_subject(id_), "generate", b"prompt") as stream:
                    while True:
                        counts[number] += len(await stream.read())
            except DynamoError as error:
                errors.append(str(error))

        nats.on_reconnect(reconnected)
        tasks = [asyncio.create_task(read(number)) for number in range(streams)]
        while await asyncio.to_thread(pipe.recv):
            await one_more(counts, errors)
            pipe.send(Report(sum(counts), len(errors), reconnects, errors[0] if errors else ""))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def one_more(counts: list[int], errors: list[str]) -> None:
    """Return when every count has grown, or there is one more error."""
    before, closed = list(counts), len(errors)
    # No event: setting one for each response would be part of the cost.
    while len(errors) == closed and any(count == former for count, former in zip(counts, before, strict=True)):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def backlog_mib(monitor_port: int) -> float:
    """Return what nats-server holds for the frontend."""
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor_port}/connz", timeout=10) as response:
        connections = msgspec.json.decode(response.read(), type=Monitor).connections
    return sum(each.pending_bytes for each in connections if each.name == "frontend") / 2**20


def all_respond(pipe: Pipe) -> Report:
    """Wait until every stream has had one more response, or one was closed."""
    pipe.send(True)
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("some streams get no response")
    report = pipe.recv()
    assert isinstance(report, Report)
    return report


async def measure(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    flood = context.Event()
    with tempfile.TemporaryDirectory() as folder:
        (monitor_port,) = free_ports(1)
        server = NatsServer(Path(folder), jetstream=False, config=f"http: 127.0.0.1:{monitor_port}")
        await server.start()
        ours, theirs = context.Pipe()
        ids = instances(options.streams)
        children = [
            context.Process(target=run_worker, args=(server.url, ids[part::PROCESSES], options.bytes, options.interval, flood))
            for part in range(PROCESSES)
        ]
        children.append(context.Process(target=run_frontend, args=(server.url, options.streams, theirs)))
        try:
            for child in children:
                child.start()
            await asyncio.to_thread(compare, ours, children[-1].pid, flood, monitor_port, options)
        finally:
            for child in children:
                child.kill()
            await server.stop()


def compare(pipe: Pipe, pid: int | None, flood: Event, monitor_port: int, options: argparse.Namespace) -> None:
    assert pid is not None
    before = all_respond(pipe)
    os.kill(pid, signal.SIGSTOP)
    flood.set()
    time.sleep(options.pause)
    backlog = backlog_mib(monitor_port)
    flood.clear()
    os.kill(pid, signal.SIGCONT)
    after = all_respond(pipe)
    pipe.send(False)
    print(f"{options.streams} streams, responses of {options.bytes} bytes, a pause of {options.pause:g} s")
    print(f"pause:  {backlog:.1f} MiB wait at nats-server")
    print(f"before: {before.responses} responses, {before.closed} streams closed, {before.reconnects} reconnects")
    print(f"after:  {after.responses} responses, {after.closed} streams closed, {after.reconnects} reconnects {after.error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two responses of a stream")
    parser.add_argument("--bytes", type=int, default=8, help="of one response")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
