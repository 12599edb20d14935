"""The thread beside the event loop for large requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dynamo.common.errors import Overloaded
from dynamo.frontend.preprocess.offload import Offload, TextThreads
from dynamo.frontend.security.keys import key_name


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


class OfKeys:
    """Work of API keys for one thread, which waits until `release` is set."""

    def __init__(self, max_pending: int) -> None:
        self.offload = Offload(max_pending)
        self.started, self.release = threading.Event(), threading.Event()
        self.done: list[str] = []
        self.sent: list[asyncio.Task[None]] = []

    async def send(self, key: str, times: int) -> None:
        key_name.set(key)
        self.sent += [asyncio.ensure_future(self.offload.run(self._work, f"{key}{number}")) for number in range(times)]
        await asyncio.sleep(0)
        while not self.started.is_set():
            await asyncio.sleep(0)

    def _work(self, name: str) -> None:
        self.started.set()
        self.release.wait()
        self.done.append(name)


async def test_work_of_a_key_waits_for_one_piece_of_each_other_key() -> None:
    of = OfKeys(100)
    await of.send("a", 20)
    await of.send("b", 2)
    await of.send("c", 1)
    of.release.set()
    await asyncio.gather(*of.sent)
    assert of.done[:6] == ["a0", "a1", "b0", "c0", "a2", "b1"]
    assert of.done[6:] == [f"a{number}" for number in range(3, 20)]


async def test_where_too_much_waits_the_last_of_the_key_with_most_makes_room_for_another_key() -> None:
    of = OfKeys(10)
    await of.send("a", 10)
    await of.send("b", 3)
    await of.send("a", 1)
    of.release.set()
    results = await asyncio.gather(*of.sent, return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, Overloaded)] == [7, 8, 9, 13]
    assert of.done[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]
    await of.send("a", 10)
    await asyncio.gather(*of.sent[14:])


async def test_work_that_was_given_up_while_it_waited_is_not_carried_out() -> None:
    of = OfKeys(10)
    await of.send("a", 3)
    of.sent[1].cancel()
    await asyncio.sleep(0)
    of.release.set()
    await asyncio.gather(*of.sent, return_exceptions=True)
    assert of.done == ["a0", "a2"]


async def test_a_text_does_not_wait_for_huge_ones_which_wait_for_one_another() -> None:
    threads = TextThreads()
    release = threading.Event()
    running = [asyncio.ensure_future(threads.run(4_000_000, release.wait)) for _ in range(12)]
    await asyncio.sleep(0)
    assert await threads.run(80_000, threading.active_count)
    assert not any(each.done() for each in running)
    release.set()
    assert all(await asyncio.gather(*running))
