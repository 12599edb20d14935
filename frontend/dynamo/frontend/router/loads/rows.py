"""A cache of the table rows of routing candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dynamo.common.discovery import Instance

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Table(Protocol[R_co]):
    """A table with a row per instance."""

    @property
    def epoch(self) -> int:
        """Changes whenever the row of an instance does."""
        ...

    def rows(self, instances: Sequence[Instance]) -> R_co: ...


class RowCache(Generic[R]):
    """Looks up the rows of the same candidates only once: the fleet changes far less often than requests arrive."""

    __slots__ = ("_epoch", "_rows", "_source", "_table")

    def __init__(self, table: Table[R]) -> None:
        self._table = table
        self._source: Sequence[Instance] | None = None
        self._epoch = -1
        self._rows: R

    def rows(self, candidates: Sequence[Instance]) -> R:
        # Only tuples are compared by identity: a list may have changed since.
        if candidates is not self._source or self._epoch != self._table.epoch:
            self._rows = self._table.rows(candidates)
            self._source = candidates if isinstance(candidates, tuple) else None
            self._epoch = self._table.epoch
        return self._rows
