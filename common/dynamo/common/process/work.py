"""Long work as a generator, which `steps` runs on an event loop beside other work; this module is plain computation."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[int, None, T]
"""Yields every few milliseconds at the latest, before memory is taken how many bytes, and returns its result."""

Hold: TypeAlias = Callable[[int], None]
"""Counts bytes as held, before they are read where they are many. Raises Overloaded."""


def hold_nothing(size_bytes: int) -> None:
    """For what takes no more memory than is counted already, or than a bound allows."""


def finish(work: Work[T]) -> T:
    """Return the result of work that is short, and whose memory is not worth counting."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: T = end.value
        return result
