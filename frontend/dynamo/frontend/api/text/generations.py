"""Combine the generations of one HTTP request, one per prompt, into a single stream of deltas.

A completion request may hold several prompts with `n` choices each. Every prompt is a generation of the data plane;
`text_source` returns something that reads like one generation, whose choice indices cover all prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

from msgspec.structs import replace

from dynamo.common.generation import Summary
from dynamo.common.names import InstanceId
from dynamo.common.process.background import awaited
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.router.base import RoutingDecision
from dynamo.frontend.serving.data_plane import Generation


class TextSource(Protocol):
    """A stream of text deltas: one generation, or several that are read as one."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def decision(self) -> RoutingDecision | None: ...

    @property
    def prefill_instance(self) -> InstanceId | None: ...

    @property
    def summary(self) -> Summary: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def read(self) -> list[TextDelta]: ...


class ParallelGenerations:
    """Runs the generations of one request side by side; choice `c` of prompt `p` has the index `p * n + c`.

    Each generation is read ahead by at most one `read`, so a slow client slows down all of them.
    """

    def __init__(self, generations: Sequence[Generation], n: int) -> None:
        self._generations = generations
        self._n = n
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: list[TextDelta] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._running = 0
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"ParallelGenerations({len(self._generations)} prompts, {self._running} running)"

    @property
    def prompt_tokens(self) -> int:
        return sum(generation.prompt_tokens for generation in self._generations)

    @property
    def decision(self) -> RoutingDecision | None:
        """The routing decision of the first prompt."""
        return self._generations[0].decision

    @property
    def prefill_instance(self) -> InstanceId | None:
        """The instance that computed the first prompt."""
        return self._generations[0].prefill_instance

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
            awaited(self._follow(generation, index * self._n), f"prompt {index}")
            for index, generation in enumerate(self._generations)
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
        """Return all deltas since the last call, of any prompt; [] when all have ended. Raises the first failure."""
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return []
            self._changed.clear()
            await self._changed.wait()
        deltas, self._ready = self._ready, []
        taken, self._taken = self._taken, asyncio.Event()
        taken.set()
        return deltas

    async def _follow(self, generation: Generation, first_index: int) -> None:
        try:
            while deltas := await generation.read():
                self._ready += [replace(delta, index=first_index + delta.index) for delta in deltas] if first_index else deltas
                taken = self._taken
                self._changed.set()
                await taken.wait()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._running -= 1
            self._changed.set()


def text_source(generations: Sequence[Generation], n: int) -> TextSource:
    """Return the one generation itself, or a source that combines several with `n` choices each."""
    return generations[0] if len(generations) == 1 else ParallelGenerations(generations, n)


async def read_carried(source: TextSource) -> None:
    """Read a response of which nothing is written here, to its end: a gateway carries it to the client."""
    while await source.read():
        pass
