"""Processes that share memory are killed at random moments: no region, no mapping and no file stays behind."""

from __future__ import annotations

import multiprocessing
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo.common.shared_memory.files import remove_stale_files
from dynamo.common.shared_memory.layout import UNIT_BYTES, Reference
from dynamo.common.shared_memory.neighbour import Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory
from tests.support.arenas import memory_folder

pytestmark = pytest.mark.slow

MOMENTS = 70
CAPACITY_BYTES = 64 * UNIT_BYTES
REFERENCE = struct.Struct("<QQQ")


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@contextmanager
def victim(work: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Run `work` in a process of its own until it is killed at the end of the body."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
        child.start()
        theirs.close()
        try:
            yield ours
        finally:
            child.kill()
            child.join()
    assert child.exitcode == -signal.SIGKILL, "the victim failed before it was killed"


def receive(channel: socket.socket, size: int) -> bytes:
    data = channel.recv(size, socket.MSG_WAITALL)
    assert len(data) == size
    return data


def meet(channel: socket.socket, memory: SharedMemory) -> Neighbour:
    """Exchange tokens with the process at the other end."""
    token = memory.token.encode()
    channel.sendall(struct.pack("<H", len(token)) + token)
    (size,) = struct.unpack("<H", receive(channel, 2))
    neighbour = memory.neighbour(receive(channel, size).decode())
    assert neighbour is not None
    return neighbour


def take(memory: SharedMemory, owner: Neighbour, channel: socket.socket) -> memoryview:
    """Take the region whose reference comes next."""
    view = memory.take(owner, Reference(*REFERENCE.unpack(receive(channel, REFERENCE.size))))
    assert view is not None
    return view


def body_of(number: int) -> bytes:
    return bytes((number % 251,)) * (1 + number * 7919 % (5 * UNIT_BYTES))


def read(channel: socket.socket, folder: Path) -> None:
    """Take every region that is offered, and drop views in random order."""
    memory = SharedMemory(folder, CAPACITY_BYTES)
    owner = meet(channel, memory)
    rng, views = random.Random(0), []
    while True:
        views.append(take(memory, owner, channel))
        if len(views) > 3:
            views.pop(rng.randrange(len(views)))
        channel.sendall(b".")


def write(channel: socket.socket, folder: Path) -> None:
    """Lend regions as long as there is room."""
    memory = SharedMemory(folder, CAPACITY_BYTES)
    reader = meet(channel, memory)
    number = 0
    while True:
        body = body_of(number)
        if reference := memory.lend([memoryview(body)], len(body), reader):
            channel.sendall(REFERENCE.pack(*reference))
            number += 1


def test_a_killed_reader_holds_no_region(folder: Path) -> None:
    memory = SharedMemory(folder, CAPACITY_BYTES)
    for seed in range(MOMENTS):
        rng = random.Random(seed)
        with victim(lambda channel: read(channel, folder)) as channel:
            reader = meet(channel, memory)
            for number in range(rng.randrange(60)):
                body = body_of(number)
                if reference := memory.lend([memoryview(body)], len(body), reader):
                    channel.sendall(REFERENCE.pack(*reference))
                    if rng.random() < 0.7:
                        receive(channel, 1)
        memory.sweep()
        assert (len(memory.arena), memory.arena.used_bytes) == (0, 0), f"seed {seed}"
        assert [path.name for path in folder.iterdir()] == [memory.token.partition(":")[0]], f"seed {seed}"
    memory.close()


def test_a_killed_owner_leaves_readers_their_views_and_nothing_else(folder: Path) -> None:
    memory = SharedMemory(folder, CAPACITY_BYTES)
    for seed in range(MOMENTS):
        rng = random.Random(seed)
        views: dict[int, memoryview] = {}
        with victim(lambda channel: write(channel, folder)) as channel:
            owner = meet(channel, memory)
            for number in range(rng.randrange(60)):
                views[number] = take(memory, owner, channel)
                if len(views) > 3:
                    del views[rng.choice(list(views))]
        assert all(view == body_of(number) for number, view in views.items()), f"seed {seed}"
        memory.sweep()
        assert [path.name for path in folder.iterdir()] == [memory.token.partition(":")[0]], f"seed {seed}"
    memory.close()


def test_a_process_killed_while_it_creates_an_arena_leaves_nothing_past_the_next_start(folder: Path) -> None:
    def create(channel: socket.socket) -> None:
        while True:
            memory = SharedMemory(folder, CAPACITY_BYTES)
            channel.sendall(b".")
            memory.close()

    live = SharedMemory(folder, CAPACITY_BYTES)
    left = 0
    for seed in range(MOMENTS):
        with victim(create) as channel:
            receive(channel, random.Random(seed).randrange(1, 20))
        left += remove_stale_files(folder)
        assert [path.name for path in folder.iterdir()] == [live.token.partition(":")[0]], f"seed {seed}"
    assert 0 < left <= MOMENTS
    live.close()
