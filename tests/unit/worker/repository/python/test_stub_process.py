"""What a worker keeps of the processes of a model that have ended."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.repository.python.stub_process import StubProcess, open_stub


def descriptors() -> list[str]:
    """Return what the descriptors of this process are of, but for numbers."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0])
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(names)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let the garbage collector free nothing, as in a worker for a long time: its thresholds are high there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["without shared memory", "with shared memory"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedMemory | None]:
    if request.param == "without shared memory":
        yield None
        return
    memory = SharedMemory(tmp_path, capacity_bytes=1 << 20, least_bytes=1 << 10)
    yield memory
    memory.close()


async def started(memory: SharedMemory | None) -> StubProcess:
    handlers: Any = None  # the model makes no calls
    return await open_stub("m", handlers, memory)


async def ended(memory: SharedMemory | None) -> StubProcess:
    process = await started(memory)
    await process.end()
    return process


async def died(memory: SharedMemory | None) -> StubProcess:
    process = await started(memory)
    os.kill(process.pid, signal.SIGKILL)
    await process.closed.wait()
    await process.end()
    return process


@pytest.mark.parametrize("gone", [ended, died])
async def test_a_process_leaves_no_descriptor_and_no_memory(
    gone: Callable[[SharedMemory | None], Awaitable[StubProcess]], without_collector: None, memory: SharedMemory | None
) -> None:
    await gone(memory)
    before = descriptors()
    processes = [await gone(memory) for _ in range(3)]
    assert descriptors() == before
    references = [weakref.ref(process) for process in processes]
    processes.clear()
    assert [reference() for reference in references] == [None] * 3
