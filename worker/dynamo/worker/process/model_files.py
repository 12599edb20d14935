"""Keeps the files of a worker's models, tokenizers and templates, in the object store, where frontends read them.

A model whose files are not stored is not offered to frontends, and holds up no other one: models without files need no store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.process.background import raise_if_cancelled
from dynamo.worker.serve import ServedModel

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_CHECK_S = 45.0
"""Files may be lost while NATS goes on: an operator has purged or deleted the bucket."""


class ModelFiles:
    """The files of the models of one worker."""

    def __init__(self, models: Sequence[ServedModel], nats: Connection, *, check_s: float = _CHECK_S) -> None:
        """`check_s`: how often `keep_stored` looks for what has been stored."""
        self.are_stored = asyncio.Event()
        """Set once every model's files have been stored."""
        self._waiting = {model.card.name for model in models if model.files}
        """Models whose files have never been stored."""
        self._keys: dict[str, frozenset[str]] = {}
        """The files of each model that were stored, by its name."""
        self._store = FileStore(nats, Path())  # only reading needs its cache on disk
        self._check_s = check_s
        self._reconnected = asyncio.Event()
        nats.on_reconnect(self._reconnected.set)

    def is_waiting(self, model: str) -> bool:
        """Return whether the files of a model have not been stored yet."""
        return model in self._waiting

    async def store(self, models: Sequence[ServedModel]) -> list[ServedModel]:
        """Try once to store the files of each model; return the models for which that failed."""
        failed = [model for model in models if not await self._is_stored(model)]
        if not self._waiting:
            self.are_stored.set()
        return failed

    async def keep_stored(self, models: Callable[[], Sequence[ServedModel]], renew: Callable[[], Awaitable[object]]) -> None:
        """Store what is not stored yet, until cancelled: and again what is not in the store after a reconnect, or any longer.

        `renew` is called when further models may be offered.
        """
        while True:
            left = [model for model in models() if self._reconnected.is_set() or self.is_waiting(model.card.name)]
            if not self._reconnected.is_set():
                lost = await self._lost()
                left += [model for model in models() if model.card.name in lost and model not in left]
            raise_if_cancelled()
            self._reconnected.clear()
            pause_s = _FIRST_PAUSE_S
            while left:
                waiting = len(self._waiting)
                left = await self.store(left)
                raise_if_cancelled()
                if len(self._waiting) < waiting:
                    await renew()
                if left:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self._reconnected.wait()

    async def _lost(self) -> set[str]:
        """Return the models that have files which were stored and are not any longer; none if the store does not respond."""
        keys = frozenset[str]().union(*self._keys.values())
        try:
            missing = await self._store.missing(keys) if keys else set[str]()
        except Unavailable as error:
            log.warning("whether the files of models are still stored is not known: %s", error)
            return set()
        return {model for model, keys in self._keys.items() if keys & missing}

    async def _is_stored(self, model: ServedModel) -> bool:
        try:
            keys = frozenset([await self._store.put(data) for data in model.files])
        except Unavailable as error:
            log.warning("model %s waits for its files to be stored: %s", model.card.name, error)
            return False
        self._keys[model.card.name] = keys
        self._waiting.discard(model.card.name)
        return True
