"""The thread beside the event loop for large requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dynamo.common.errors import Overloaded
from dynamo.frontend.preprocess.offload import Offload, TextThreads


async def test_small_work_runs_at_once_and_large_work_in_a_thread() -> None:
    offload = Offload()
    assert await offload.run_if(False, threading.get_ident) == threading.get_ident()
    assert await offload.run_if(True, threading.get_ident) != threading.get_ident()


async def test_errors_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await Offload().run(divmod, 1, 0)


async def test_more_work_than_the_bound_is_rejected_until_some_has_ended() -> None:
    offload = Offload(max_pending=2)
    release = threading.Event()
    running = [asyncio.ensure_future(offload.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await offload.run(release.wait)
    release.set()
    await asyncio.gather(*running)
    assert await offload.run(release.wait)


async def test_work_of_a_caller_that_gave_up_still_counts_until_it_ends() -> None:
    offload = Offload(max_pending=1)
    release = threading.Event()
    started = threading.Event()

    def wait() -> bool:
        started.set()
        return release.wait()

    task = asyncio.ensure_future(offload.run(wait))
    while not started.is_set():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(Overloaded):
        await offload.run(release.wait)
    release.set()


async def test_a_text_does_not_wait_for_huge_ones_which_wait_for_one_another() -> None:
    threads = TextThreads()
    release = threading.Event()
    running = [asyncio.ensure_future(threads.run(4_000_000, release.wait)) for _ in range(12)]
    await asyncio.sleep(0)
    assert await threads.run(80_000, threading.active_count)
    assert not any(each.done() for each in running)
    release.set()
    assert all(await asyncio.gather(*running))
