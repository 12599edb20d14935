"""A worker that sleeps: its accelerators' memory is free for others, while its process and its connections stay.

    asleep:  deregistered → requests are refused, which go elsewhere → drained → engines sleep
    awake:   engines wake → requests are taken → registered

so a request is given to an engine only while that engine is awake, and no request fails as long as others serve the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dynamo.common.errors import ShuttingDown, Unavailable, Unsupported
from dynamo.common.lifecycle import within
from dynamo.worker.engine.base import Sleeps
from dynamo.worker.serve import ServedModel, Service

log = logging.getLogger(__name__)


class Requests(Protocol):
    """The part of `messaging.server.RequestServer` that falling asleep needs."""

    async def drained(self) -> None: ...

    def stop_all(self) -> None: ...


class Sleeper:
    """Puts all engines of one worker to sleep and wakes them: one change at a time, each completed or undone."""

    def __init__(
        self,
        engines: Sequence[object],
        service: Service,
        requests: Requests,
        hide: Callable[[bool], Awaitable[bool]],
        drain_timeout_s: float,
    ) -> None:
        """`hide` takes the worker off the fleet's lists, or puts it back; False: etcd does not have that yet."""
        self.is_sleeping = False
        """All engines sleep."""
        self.is_away = False
        """From before the worker falls asleep until it serves again."""
        self._engines = engines
        self._service = service
        self._requests = requests
        self._hide = hide
        self._drain_timeout_s = drain_timeout_s
        self._models: tuple[ServedModel, ...] = ()
        """To be served again."""
        self._turn = asyncio.Lock()
        self._closed = False

    async def sleep(self) -> None:
        """Returns when all engines sleep, which they may do already.

        What is still open after the drain timeout is refused, in words that let callers go on elsewhere. Raises Unsupported if
        an engine cannot sleep, Unavailable while frontends cannot be told, and, awake again, what an engine failed with.
        """
        engines = [_sleeping(engine) for engine in self._engines]
        async with self._turn:
            self._check_open()
            if self.is_sleeping:
                return
            self.is_away = True
            try:
                if not await self._hide(True):
                    raise Unavailable("etcd is away, so frontends would go on sending requests")
                self._models = self._models or self._service.models
                for model in self._models:
                    self._service.remove(model.card.name)
                await within(self._drain_timeout_s, self._requests.drained(), "draining before the sleep")
                self._requests.stop_all()
                for engine in engines:
                    await engine.sleep()
            except Exception:
                await self._wake()
                raise
            self.is_sleeping = True
            log.info("asleep")

    async def wake(self) -> None:
        """Returns when requests are served again. Raises what an engine fails with: then the worker stays away."""
        async with self._turn:
            self._check_open()
            if self.is_away:
                await self._wake()

    async def _wake(self) -> None:
        if self._models:
            for engine in self._engines:
                await _sleeping(engine).wake()
        self.is_sleeping = False
        for model in self._models:
            self._service.put(model)
        self._models = ()
        await self._hide(False)
        self.is_away = False
        log.info("awake")

    async def close(self) -> None:
        """Waits for the change that is under way; no other is begun after it."""
        self._closed = True
        if await within(self._drain_timeout_s, self._turn.acquire(), "falling asleep or waking"):
            self._turn.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("the worker")


def _sleeping(engine: object) -> Sleeps:
    """Raises Unsupported if it cannot."""
    if not isinstance(engine, Sleeps):
        raise Unsupported(f"the engine ({type(engine).__name__}) cannot sleep")
    engine.check_sleep()
    return engine
