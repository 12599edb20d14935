from __future__ import annotations

import asyncio

from dynamo.common.process.lazy_event import LazyEvent


async def test_all_that_wait_for_an_event_go_on_when_it_is_set() -> None:
    event = LazyEvent()
    waiting = [asyncio.ensure_future(event.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not event.is_set()
    assert not any(task.done() for task in waiting)
    event.set()
    assert await asyncio.gather(*waiting) == [True, True]


async def test_an_event_that_was_set_is_not_waited_for() -> None:
    event = LazyEvent()
    event.set()
    assert event.is_set()
    assert await event.wait()
