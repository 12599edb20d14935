"""A queue that is fair between API keys, however many requests each has in it.

Each key has a line of its own. The next request is the first one of the key that was served least, measured in the cost of its
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
    """Items in line. What it remembers of keys without items is forgotten when it is of no consequence any more."""

    def __init__(self) -> None:
        self._lines: dict[str, list[T]] = {}
        self._served: dict[str, float] = {}
        """What each key was served, as if it had always had items."""
        self._now = 0.0
        """What the key was served that had an item popped last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        for line in self._lines.values():
            yield from line

    def __contains__(self, item: T) -> bool:
        return item in self._lines.get(item.key, ())

    def push(self, item: T) -> None:
        line = self._lines.get(item.key)
        if line is None:
            line = self._lines[item.key] = []
            self._served[item.key] = max(self._served.get(item.key, 0.0), self._now)
        heapq.heappush(line, item)
        self._count += 1

    def heads(self, may: Callable[[T], bool] | None = None) -> Iterator[T]:
        """Yield the first item of each key, of those for which `may` returns true."""
        for line in self._lines.values():
            if may is None or may(line[0]):
                yield line[0]
            elif (first := min(filter(may, line), default=None)) is not None:
                yield first

    def next(self, served: Mapping[str, float] = MappingProxyType({}), may: Callable[[T], bool] | None = None) -> T | None:
        """Return the next item: of the key that has the least in `served` and, of equal ones, was served least here."""

        def order(item: T) -> tuple[float, float, float]:
            return item.rank, served.get(item.key, 0.0), self._served[item.key]

        return min(self.heads(may), key=order, default=None)

    def pop(self, first: T, choose: Callable[[Sequence[T]], T] | None = None, may: Callable[[T], bool] | None = None) -> T:
        """Remove and return `first`, which `next` has returned, or the one of its key that `choose` returns."""
        key = first.key
        line = self._lines[key]
        item = first if choose is None else choose(line if may is None else [each for each in line if may(each)])
        if item is line[0]:
            heapq.heappop(line)
        else:
            line.remove(item)
            heapq.heapify(line)
        self._now = max(self._now, self._served[key])
        self._removed(key)
        return item

    def remove(self, item: T) -> None:
        line = self._lines[item.key]
        line.remove(item)
        heapq.heapify(line)
        self._removed(item.key)

    def charge(self, key: str, cost: float, weight: float) -> None:
        """An item of a key was served."""
        self._served[key] = max(self._served.get(key, 0.0), self._now) + cost / weight
        self._forget()

    def before(self, item: T) -> int:
        """Return about how many items would be next before `item`, which is not in line: as if all had the same cost."""
        own = sum(other < item for other in self._lines.get(item.key, ()))
        count = own
        for key, line in self._lines.items():
            if key != item.key:
                higher = sum(other.rank < item.rank for other in line)
                equal = sum(other.rank == item.rank for other in line)
                count += higher + min(equal, own + 1)
        return count

    def last_of_longest(self, item: T) -> T | None:
        """Return the last item of the key that has the most, if that key has more of them than `item`'s would; else None.

        It ranks no higher than `item`, which is not in line.
        """
        line = max(self._lines.values(), key=len, default=[])
        if len(line) <= len(self._lines.get(item.key, ())) + 1:
            return None
        last = max(line)
        return None if last.rank < item.rank else last

    def _removed(self, key: str) -> None:
        self._count -= 1
        if not self._lines[key]:
            del self._lines[key]
            self._forget()

    def _forget(self) -> None:
        for key in [key for key, served in self._served.items() if key not in self._lines and served <= self._now]:
            del self._served[key]
