"""A line in which owners have turns: however much one of them has waiting, the first items of the others soon come."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Items that wait, each of an owner. One is taken of each owner in turn, of an owner in order."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}
        """By owner; the owner whose turn it is comes first. None has an empty line."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def count(self, owner: str) -> int:
        return len(self._items.get(owner, ()))

    def append(self, owner: str, item: T) -> None:
        self._items.setdefault(owner, deque()).append(item)

    def take(self) -> T:
        """Take the first item of the owner whose turn it is, of a line that is not empty."""
        owner = next(iter(self._items))
        items = self._items.pop(owner)
        item = items.popleft()
        if items:
            self._items[owner] = items
        return item

    def longest(self) -> str:
        """Return the owner of most items. Raises ValueError if nothing waits."""
        return max(self._items, key=self.count)

    def last(self, owner: str) -> T:
        return self._items[owner][-1]

    def take_last(self, owner: str) -> T:
        """Take what an owner of several items has appended last."""
        return self._items[owner].pop()
