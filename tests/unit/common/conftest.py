from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Function) -> Mapping[str, LoopFactory]:
    """Run the tests of a module on each of its `LOOP_FACTORIES`."""
    factories: Mapping[str, LoopFactory] = getattr(item.module, "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop})
    return factories
