"""The generations behind one HTTP request: one per prompt, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

from msgspec.structs import replace

from dynamo.common.background import awaited
from dynamo.common.generation import Summary
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.router.base import RoutingDecision
from dynamo.frontend.serving.data_plane import Generation


class Source(Protocol):
    """Where an answer comes from: a generation, or several."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def decision(self) -> RoutingDecision | None: ...

    @property
    def summary(self) -> Summary: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def read(self) -> list[TextDelta]: ...


class Several:
    """Generations of one request, side by side: decision `c` of the `p`-th of them is decision `p * n + c` here.

    Each is read ahead by one `read` at most, so a slow client holds back all of them.
    """

    def __init__(self, generations: Sequence[Generation], n: int) -> None:
        self._generations = generations
        self._n = n
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: list[TextDelta] = []
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._running = 0
        self._failure: BaseException | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(generation.prompt_tokens for generation in self._generations)

    @property
    def decision(self) -> RoutingDecision | None:
        """Where the first of them went."""
        return self._generations[0].decision

    @property
    def summary(self) -> Summary:
        parts = [generation.summary for generation in self._generations]
        return Summary(
            prompt_tokens=self.prompt_tokens,
            output_tokens=sum(part.output_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            queue_ms=max(part.queue_ms for part in parts),
            prefill_ms=max(part.prefill_ms for part in parts),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for generation in self._generations:
                await stack.enter_async_context(generation)
            self._stack = stack.pop_all()
        self._running = len(self._generations)
        self._tasks = [
            awaited(self._follow(generation, at * self._n), f"prompt {at}") for at, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def read(self) -> list[TextDelta]:
        """All text since the last call, of whichever prompts; [] when all have ended. Raises the first failure of any."""
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return []
            self._news.clear()
            await self._news.wait()
        deltas, self._ready = self._ready, []
        taken, self._taken = self._taken, asyncio.Event()
        taken.set()
        return deltas

    async def _follow(self, generation: Generation, first: int) -> None:
        try:
            while deltas := await generation.read():
                self._ready += [replace(delta, index=first + delta.index) for delta in deltas] if first else deltas
                taken = self._taken
                self._news.set()
                await taken.wait()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._running -= 1
            self._news.set()


def one_source(generations: Sequence[Generation], n: int) -> Source:
    return generations[0] if len(generations) == 1 else Several(generations, n)
