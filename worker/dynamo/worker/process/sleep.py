"""A worker that sleeps: its accelerators' memory is free for others, while its process and its connections stay.

    asleep:  deregistered → requests are refused, which go elsewhere → drained → engines sleep
    awake:   engines wake → requests are taken → registered

so a request is given to an engine only while that engine is awake, and no request fails as long as others serve the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from dynamo.common.errors import ShuttingDown, Unavailable, Unsupported
from dynamo.common.lifecycle import within
from dynamo.common.messaging.request_plane.server import RequestServer
from dynamo.worker.engine.base import Sleeps
from dynamo.worker.serve import ServedModel, Service

log = logging.getLogger(__name__)

_CANCEL_S = 1.0
"""A change that is cancelled gets this long to end."""


class Sleeper:
    """Puts all engines of one worker to sleep and wakes them. Changes happen one at a time; each is completed or undone."""

    def __init__(
        self,
        engines: Sequence[object],
        service: Service,
        requests: RequestServer,
        hide: Callable[[bool], Awaitable[bool]],
        drain_timeout_s: float,
    ) -> None:
        """`hide` deregisters the worker, or registers it again, and returns False if etcd does not have that yet."""
        self.is_sleeping = False
        """Whether all engines sleep."""
        self.is_away = False
        """True from before the worker falls asleep until it serves again."""
        self._engines = engines
        self._service = service
        self._requests = requests
        self._hide = hide
        self._drain_timeout_s = drain_timeout_s
        self._models: tuple[ServedModel, ...] = ()
        """The models to serve again."""
        self._turn = asyncio.Lock()
        self._changing: asyncio.Task[object] | None = None
        """The task that has the turn."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<Sleeper, sleeping={self.is_sleeping}, away={self.is_away}>"

    async def sleep(self) -> None:
        """Return when all engines sleep, which may be the case already.

        Requests still open after the drain timeout are refused with an error that lets callers retry elsewhere. Raises
        Unsupported if an engine cannot sleep, Unavailable while etcd is away, and the error of an engine, after waking all.
        """
        engines = [_sleeping(engine) for engine in self._engines]
        async with self._alone():
            if self.is_sleeping:
                return
            self.is_away = True
            try:
                if not await self._hide(True):
                    raise Unavailable("etcd is away, so frontends would continue to send requests")
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
            log.info("asleep: all engines sleep")

    async def wake(self) -> None:
        """Return when requests are served again. Raises the error of an engine: then the worker stays deregistered."""
        async with self._alone():
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
        log.info("awake: requests are served again")

    async def close(self) -> None:
        """Wait for the change in progress; past the drain timeout, cancel it. No other begins after it."""
        self._closed = True
        if await within(self._drain_timeout_s, self._turn.acquire(), "falling asleep or waking"):
            self._turn.release()
        elif self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing}, timeout=_CANCEL_S)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the turn. Raises ShuttingDown once the worker is closed."""
        async with self._turn:
            if self._closed:
                raise ShuttingDown("the worker")
            self._changing = asyncio.current_task()
            try:
                yield
            finally:
                self._changing = None


def _sleeping(engine: object) -> Sleeps:
    """Return `engine`. Raises Unsupported if it cannot sleep."""
    if not isinstance(engine, Sleeps):
        raise Unsupported(f"the engine ({type(engine).__name__}) cannot sleep")
    engine.check_sleep()
    return engine
