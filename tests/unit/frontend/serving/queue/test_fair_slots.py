"""Places for work, held by hand."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.queue.fair_slots import FairSlots


async def test_a_place_is_given_back_once() -> None:
    slots = FairSlots(1)
    release = await slots.take(ANONYMOUS)
    second, third = asyncio.create_task(slots.take(ANONYMOUS)), asyncio.create_task(slots.take(ANONYMOUS))
    release()
    release()
    await second
    await asyncio.sleep(0)
    assert not third.done()
    second.result()()
    (await third)()


@pytest.mark.parametrize("has_turn", [True, False])
async def test_who_gives_up_waiting_takes_no_place(has_turn: bool) -> None:
    slots = FairSlots(1)
    release = await slots.take(ANONYMOUS)
    waiting = asyncio.create_task(slots.take(ANONYMOUS))
    await asyncio.sleep(0)
    if has_turn:
        release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release()
    (await slots.take(ANONYMOUS))()
