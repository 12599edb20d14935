"""How long outputs are: of a model, of an API key's requests for it, and of a session's, learned as they are completed.

A key's mean counts as much as eight requests of the model as a whole until it has had more, and a session's as much as eight of
its key, so that the first ones decide little. Later requests count more than earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

MAX_KEPT = 20_000
"""Models, keys and sessions together. Clients may invent sessions: of more, the least recently used one is forgotten."""
_MEMORY = 64
"""Requests over which a mean goes, about."""
_PRIOR = 8.0
"""Requests that what is known of the wider group weighs."""

_Group: TypeAlias = tuple[str, ...]
"""A model, a key's part of it, or a session's part of that."""


@dataclass(slots=True)
class _Mean:
    requests: int = 0
    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        self.requests = min(self.requests + 1, _MEMORY)
        self.tokens += (tokens - self.tokens) / self.requests


class OutputLengths:
    """The means of one process. Lengths are in tokens of one response."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._means: OrderedDict[_Group, _Mean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def learn(self, model: str, key: str, session: str, tokens: float) -> None:
        """Note that a request was completed. `key` and `session` may be empty."""
        for group in reversed(_groups(model, key, session)):
            self._means.setdefault(group, _Mean()).add(tokens)
            self._means.move_to_end(group)
        while len(self._means) > self._most:
            self._means.popitem(last=False)

    def expected(self, model: str, key: str, session: str) -> float:
        """Return the mean length to expect; 0: no request of the model has been completed."""
        expected = weight = 0.0
        for group in _groups(model, key, session):
            mean = self._means.get(group)
            if mean is None:
                break
            expected = (weight * expected + mean.requests * mean.tokens) / (weight + mean.requests)
            weight = _PRIOR
        return expected


def _groups(model: str, key: str, session: str) -> list[_Group]:
    """Return what a request belongs to, the widest group first."""
    groups: list[_Group] = [(model,)]
    if key or session:
        groups.append((model, key))
    if session:
        groups.append((model, key, session))
    return groups
