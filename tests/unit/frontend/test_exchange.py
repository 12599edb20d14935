from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo.frontend.api.exchange import Exchange, HttpSettings


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def never() -> dict[str, Any]:
    raise AssertionError("nobody reads the request")


async def ignore(message: Any) -> None:
    pass


async def stream(exchange: Exchange, events: int) -> None:
    async with exchange.events() as stream:
        for _ in range(events):
            await stream.write(b"data: {}\n\n")
        if events:
            await stream.end(b"data: [DONE]\n\n")


@pytest.mark.parametrize("events", [0, 2], ids=["that never began", "with events"])
async def test_a_stream_leaves_no_work_for_the_garbage_collector(events: int, no_collector: None) -> None:
    exchange = Exchange({"type": "http", "path": "/", "headers": []}, never, ignore, HttpSettings())
    await stream(exchange, events)
    left = weakref.ref(exchange)
    del exchange
    assert left() is None
