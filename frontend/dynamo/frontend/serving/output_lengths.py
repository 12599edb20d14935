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

_Group: TypeAlias = str | tuple[str, ...]
"""A model, a key's part of it, or a session's part of that."""


@dataclass(slots=True)
class _Mean:
    requests: int = 0
    tokens: float = 0.0


class OutputLengths:
    """The means of one process. Lengths are in tokens of one response."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._means: OrderedDict[_Group, _Mean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def learn(self, model: str, key: str, session: str, tokens: float) -> None:
        """Note that a request was completed. `key` and `session` may be empty."""
        means = self._means
        for group in (*_narrower(model, key, session), model) if key or session else (model,):
            mean = means.get(group)
            if mean is None:
                mean = means[group] = _Mean()
            if mean.requests < _MEMORY:
                mean.requests += 1
            mean.tokens += (tokens - mean.tokens) / mean.requests
            means.move_to_end(group)
        while len(means) > self._most:
            means.popitem(last=False)

    def expected(self, model: str, key: str, session: str) -> float:
        """Return the mean length to expect; 0: no request of the model has been completed."""
        mean = self._means.get(model)
        if mean is None or not (key or session):
            return 0.0 if mean is None else mean.tokens
        expected = mean.tokens
        for group in reversed(_narrower(model, key, session)):
            mean = self._means.get(group)
            if mean is None:
                break
            expected = (_PRIOR * expected + mean.requests * mean.tokens) / (_PRIOR + mean.requests)
        return expected


def _narrower(model: str, key: str, session: str) -> list[_Group]:
    """Return what a request belongs to within its model, the narrowest group first."""
    return [(model, key, session), (model, key)] if session else [(model, key)]
