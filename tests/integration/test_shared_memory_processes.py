"""Whole requests between real processes: killed at random moments they leave no region, no view and no file; and separate mounts.

`KILLS=200` in the environment has each of them killed so often; `make kills` does.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.limits import KIB, PlaneLimits
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import NatsOptions, SharedMemoryOptions
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from tests.support.arenas import memory_folder
from tests.support.servers import NatsServer

CLONE_NEWNS = 0x20000
KILLS = int(os.environ.get("KILLS", "30"))
SIZES = (4, 40 * KIB, 100 * KIB, 600 * KIB)
QUICK = PlaneLimits(beat_s=0.05, probe_after_s=0.2, gone_after_s=5.0, reconnect_grace_s=0.0, absent_grace_s=0.0)
"""Peers are killed again and again: each is missed at once. One that lives has production's time to respond."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def body(number: int) -> bytes:
    return bytes((number % 251,)) * SIZES[number % len(SIZES)]


async def echo(request: Incoming) -> None:
    request.send_nowait(request.body)
    await asyncio.sleep(0)
    request.end(request.body)


@asynccontextmanager
async def frontend(nats: NatsServer, endpoint: Endpoint, folder: Path) -> AsyncIterator[tuple[RequestClient, SharedMemory]]:
    async with AsyncExitStack() as stack:
        memory = await stack.enter_async_context(open_shared_memory(SharedMemoryOptions(dir=folder, size=2**22)))
        connection = await stack.enter_async_context(connect_nats(NatsOptions(servers=(nats.url,)), "frontend"))
        assert memory is not None
        yield await stack.enter_async_context(open_client(connection, endpoint.namespace, QUICK, memory)), memory


@asynccontextmanager
async def worker(
    nats: NatsServer, endpoint: Endpoint, instance: InstanceId, folder: Path
) -> AsyncIterator[tuple[RequestServer, SharedMemory]]:
    async with AsyncExitStack() as stack:
        memory = await stack.enter_async_context(open_shared_memory(SharedMemoryOptions(dir=folder, size=2**22)))
        connection = await stack.enter_async_context(connect_nats(NatsOptions(servers=(nats.url,)), "worker"))
        assert memory is not None
        served = serve_requests(connection, endpoint, instance, {"echo": echo}, QUICK, memory)
        yield await stack.enter_async_context(served), memory


def send(client: RequestClient, endpoint: Endpoint, instance: InstanceId, number: int, token: str) -> RequestStream:
    return client.open(instance, endpoint.rpc_subject(instance), "echo", body(number), arena=token)


@asynccontextmanager
async def victim(work: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> AsyncIterator[str]:
    """Run `work` in a process of its own and yield what it sends first; it is killed at the end of the body."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(work(theirs)))
        child.start()
        theirs.close()
        try:
            yield (await asyncio.to_thread(ours.recv, 1000)).decode()
        finally:
            child.kill()
            await asyncio.to_thread(child.join)
    assert child.exitcode == -signal.SIGKILL, "the victim failed before it was killed"


async def some_turns(rng: random.Random) -> None:
    for _ in range(rng.randrange(40)):
        await asyncio.sleep(0)


def check_nothing_is_left(memory: SharedMemory, folder: Path) -> None:
    memory.sweep()
    assert (len(memory.arena), memory.arena.used_bytes, memory.held_regions) == (0, 0, 0)
    assert [path.name for path in folder.iterdir()] == [memory.token.partition(":")[0]]


async def read(stream: RequestStream, number: int) -> None:
    async with stream:
        while responses := await stream.read():
            assert all(response == body(number) for response in responses)
        assert stream.trailer == body(number)


@pytest.mark.slow
async def test_a_worker_that_is_killed_leaves_nothing_at_any_moment_of_a_request(
    nats_server: NatsServer, namespace: str, folder: Path
) -> None:
    endpoint = Endpoint(namespace=namespace)
    async with frontend(nats_server, endpoint, folder) as (client, memory):
        for seed in range(KILLS):
            rng, instance = random.Random(seed), new_instance_id()

            async def serve(channel: socket.socket, instance: InstanceId = instance) -> None:
                async with worker(nats_server, endpoint, instance, folder) as (_, own):
                    channel.sendall(own.token.encode())
                    await asyncio.Event().wait()

            async with victim(serve) as token:
                count = rng.randrange(1, 12)
                streams = [send(client, endpoint, instance, number, token) for number in range(count)]
                tasks = [asyncio.ensure_future(read(stream, number)) for number, stream in enumerate(streams)]
                if rng.random() < 0.8:
                    await tasks[rng.randrange(count)]
                await some_turns(rng)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [result for result in results if isinstance(result, AssertionError)], f"seed {seed}"
            del results, tasks, streams
            check_nothing_is_left(memory, folder)
        assert memory.bytes["taken"], "bodies came by reference"


@pytest.mark.slow
async def test_a_frontend_that_is_killed_leaves_nothing_at_any_moment_of_a_request(
    nats_server: NatsServer, namespace: str, folder: Path
) -> None:
    endpoint, instance = Endpoint(namespace=namespace), new_instance_id()
    async with worker(nats_server, endpoint, instance, folder) as (server, memory):
        for seed in range(KILLS):
            rng = random.Random(seed)

            async def request(channel: socket.socket) -> None:
                async with frontend(nats_server, endpoint, folder) as (client, _), asyncio.TaskGroup() as tasks:

                    async def repeat(number: int) -> None:
                        while True:
                            await read(send(client, endpoint, instance, number, memory.token), number)
                            number += 4

                    channel.sendall(b"ready")
                    for number in range(4):
                        tasks.create_task(repeat(number))

            async with victim(request):
                taken = memory.bytes["taken"]
                while memory.bytes["taken"] - taken < rng.randrange(3_000_000):
                    await asyncio.sleep(0)
                await some_turns(rng)
            async with asyncio.timeout(120):
                while server.open_requests:
                    await asyncio.sleep(0.01)
            check_nothing_is_left(memory, folder)


def mount_apart(folder: Path) -> bool:
    """Give this process a folder of its own in place of `folder`, which others do not see. Return whether it may do that."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return False
    commands = ("mount --make-rprivate /", f"mount -t tmpfs tmpfs {folder}")
    return all(subprocess.run(command.split(), stderr=subprocess.DEVNULL).returncode == 0 for command in commands)


async def test_a_worker_in_a_mount_namespace_of_its_own_gets_bodies_in_messages(
    nats_server: NatsServer, namespace: str, folder: Path
) -> None:
    endpoint, instance = Endpoint(namespace=namespace), new_instance_id()

    async def serve(channel: socket.socket) -> None:
        if not mount_apart(folder):
            channel.sendall(b"not permitted")
            signal.pause()
        async with worker(nats_server, endpoint, instance, folder) as (_, own):
            channel.sendall(own.token.encode())
            await asyncio.Event().wait()

    async with frontend(nats_server, endpoint, folder) as (client, memory), victim(serve) as token:
        if token == "not permitted":
            pytest.skip("mount namespaces need CAP_SYS_ADMIN")
        for number in range(8):
            await read(send(client, endpoint, instance, number, token), number)
        assert (memory.bytes, memory.fallbacks) == ({}, {"unreachable": 1})
        check_nothing_is_left(memory, folder)
