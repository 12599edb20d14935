"""Long work as a generator, which `steps` runs on an event loop beside other work; this module is plain computation."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[int, None, T]
"""Yields every few milliseconds at the latest, before memory is taken how many bytes, and returns its result."""


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
