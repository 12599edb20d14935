"""From the candidates of a decision to their rows in a table of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynamo.common.discovery import Instance

Rows = NDArray[np.intp]


class Table(Protocol):
    """Something that keeps a row per instance."""

    @property
    def epoch(self) -> int:
        """Changes whenever the row of an instance does."""
        ...

    def rows(self, instances: Sequence[Instance]) -> Rows: ...


class RowCache:
    """Looks the same candidates up once: the fleet changes far less often than requests come."""

    __slots__ = ("_epoch", "_rows", "_source", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._source: Sequence[Instance] = ()
        self._rows: Rows = np.zeros(0, dtype=np.intp)
        self._epoch = -1

    def rows(self, candidates: Sequence[Instance]) -> Rows:
        # Only a tuple may be known by identity: a list can have changed since.
        if candidates is not self._source or self._epoch != self._table.epoch:
            self._rows = self._table.rows(candidates)
            self._source = candidates if isinstance(candidates, tuple) else ()
            self._epoch = self._table.epoch
        return self._rows
