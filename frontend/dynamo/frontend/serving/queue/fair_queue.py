"""A queue that is fair between API keys, however many requests each has in it.

Each key has a queue of its own. The next request is the first one of the key that was served least, measured in the cost of its
requests over the weight of the key. A key that was away does not catch up: it begins with those that are served now. So each
of n keys of equal weight that have requests waiting gets an nth, and a key that sends few requests waits for at most one of
each other key.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar


class QueueItem(Protocol):
    """What waits. Items of one key are ordered by `<`."""

    @property
    def key(self) -> str:
        """The API key on whose behalf it waits; empty without one."""
        ...

    @property
    def rank(self) -> float:
        """Lower ranks of any key are next before all higher ones."""
        ...

    def __lt__(self, other: object, /) -> bool: ...


T = TypeVar("T", bound=QueueItem)


class FairQueue(Generic[T]):
    """Items that wait. What it remembers of keys without items is forgotten when it is of no consequence any more."""

    def __init__(self) -> None:
        self._queues: dict[str, list[T]] = {}
        self._served: dict[str, float] = {}
        """What each key was served, as if it had always had items."""
        self._now = 0.0
        """What the key was served that had an item popped last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, item: T) -> bool:
        return item in self._queues.get(item.key, ())

    def push(self, item: T) -> None:
        queue = self._queues.get(item.key)
        if queue is None:
            queue = self._queues[item.key] = []
            self._served[item.key] = max(self._served.get(item.key, 0.0), self._now)
        heapq.heappush(queue, item)
        self._count += 1

    def heads(self, may: Callable[[T], bool] | None = None) -> Iterator[T]:
        """Yield the first item of each key, of those for which `may` returns true."""
        for queue in self._queues.values():
            if may is None or may(queue[0]):
                yield queue[0]
            elif (first := min(filter(may, queue), default=None)) is not None:
                yield first

    def next(self, served: Mapping[str, float] = MappingProxyType({}), may: Callable[[T], bool] | None = None) -> T | None:
        """Return the next item: of the key that has the least in `served` and, of equal ones, was served least here."""

        def order(item: T) -> tuple[float, float, float]:
            return item.rank, served.get(item.key, 0.0), self._served[item.key]

        return min(self.heads(may), key=order, default=None)

    def pop(self, first: T, choose: Callable[[Sequence[T]], T] | None = None, may: Callable[[T], bool] | None = None) -> T:
        """Remove and return `first`, which `next` has returned, or the one of its key that `choose` returns."""
        key = first.key
        queue = self._queues[key]
        item = first if choose is None else choose(queue if may is None else [each for each in queue if may(each)])
        if item is queue[0]:
            heapq.heappop(queue)
        else:
            queue.remove(item)
            heapq.heapify(queue)
        self._now = max(self._now, self._served[key])
        self._removed(key)
        return item

    def remove(self, item: T) -> None:
        queue = self._queues[item.key]
        queue.remove(item)
        heapq.heapify(queue)
        self._removed(item.key)

    def charge(self, key: str, cost: float, weight: float) -> None:
        """An item of a key was served."""
        self._served[key] = max(self._served.get(key, 0.0), self._now) + cost / weight
        self._forget()

    def before(self, item: T) -> int:
        """Return about how many items would be next before `item`, which is not in queue: as if all had the same cost."""
        own = sum(other < item for other in self._queues.get(item.key, ()))
        count = own
        for key, queue in self._queues.items():
            if key != item.key:
                higher = sum(other.rank < item.rank for other in queue)
                equal = sum(other.rank == item.rank for other in queue)
                count += higher + min(equal, own + 1)
        return count

    def last_of_longest(self, item: T) -> T | None:
        """Return the last item of the key that has the most, if that key has more of them than `item`'s would; else None.

        It ranks no higher than `item`, which is not in queue.
        """
        queue = max(self._queues.values(), key=len, default=[])
        if len(queue) <= len(self._queues.get(item.key, ())) + 1:
            return None
        last = max(queue)
        return None if last.rank < item.rank else last

    def _removed(self, key: str) -> None:
        self._count -= 1
        if not self._queues[key]:
            del self._queues[key]
            self._forget()

    def _forget(self) -> None:
        for key in [key for key, served in self._served.items() if key not in self._queues and served <= self._now]:
            del self._served[key]
