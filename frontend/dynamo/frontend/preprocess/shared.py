"""Values that are costly to make and to keep: made at first use, shared by all who need them, evicted by size."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from dynamo.common.process.background import awaited

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shared(Generic[K, V]):
    """At most `max_bytes` of values, by key, and beyond that only what is in use. The least recently used is evicted first.

    A value is in use while other code refers to it. It stays here as well, so that it is never made a second time beside the
    first. Values must be weakly referable and free of reference cycles.
    """

    def __init__(self, make: Callable[[K], Coroutine[Any, Any, V]], size_of: Callable[[V], int], max_bytes: int) -> None:
        self._make = make
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._values: dict[K, V] = {}
        """In order of use, the last used one at the end."""
        self._making: dict[K, asyncio.Task[V]] = {}
        self._bytes = self._largest_bytes = 0

    def __repr__(self) -> str:
        return f"Shared({len(self._values)} values of {self._bytes} bytes, {len(self._making)} being made)"

    def __len__(self) -> int:
        """The number of values that are there or being made."""
        return len(self._values) + len(self._making)

    def __contains__(self, key: K) -> bool:
        """Whether a value is there or being made."""
        return key in self._values or key in self._making

    @property
    def has_room(self) -> bool:
        """Whether a value as large as the largest so far fits without an eviction."""
        return self._bytes + self._largest_bytes < self._max_bytes

    def get(self, key: K) -> V | None:
        """Return a value if it is there."""
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    async def load(self, key: K) -> V:
        """Return a value, made now if it is not there, once for all who wait for it. Raises what `make` raises.

        A caller that is cancelled does not stop the others, nor the making.
        """
        if (value := self.get(key)) is not None:
            return value
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = awaited(self._make(key), f"load {key}")
            task.add_done_callback(lambda task: self._made(key, task))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop making values."""
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, key: K, task: asyncio.Task[V]) -> None:
        del self._making[key]
        if not task.cancelled() and task.exception() is None:  # a failure is for those who await it, if there are any
            size = self._size_of(task.result())
            self._values[key] = task.result()
            self._bytes += size
            self._largest_bytes = max(self._largest_bytes, size)
            self._evict()

    def _evict(self) -> None:
        for key in list(self._values):
            if self._bytes <= self._max_bytes:
                return
            value = self._values.pop(key)
            size, reference = self._size_of(value), weakref.ref(value)
            del value
            if (used := reference()) is not None:
                self._values[key] = used
            else:
                self._bytes -= size
