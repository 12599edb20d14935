"""Work that one process of the fleet does at a time: the one that puts a key into etcd first does it, until its lease ends.

A key may be lost while its lease goes on, as where etcd is restored from a snapshot. So the holder watches its keys: it puts back
one that is absent, and leaves alone one that is another process's by now.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from dynamo.common.errors import DynamoError
from dynamo.common.etcd.client import Etcd
from dynamo.common.etcd.errors import LeaseLost
from dynamo.common.etcd.follow import follow
from dynamo.common.etcd.lease import LeaseSession
from dynamo.common.etcd.watch import Deleted, Events, Put, Reset
from dynamo.common.process.background import running

log = logging.getLogger(__name__)

_TTL_S = 10.0
RETRY_S = 5.0
"""After a name could not be released, and between attempts to do so."""


class Leases:
    """What this process has taken, below one prefix; use `open_leases`."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.session: LeaseSession | None = None
        self._etcd = etcd
        self._prefix = prefix
        self._holder = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
        self._taken: dict[str, int] = {}
        """The lease under which each name was taken."""
        self._unreleased: set[str] = set()
        """Names that are to be released, which failed so far."""
        self._has_failed = asyncio.Event()
        self._lock = asyncio.Lock()
        """So that no name is taken while it is being released."""
        self._on_lost: list[Callable[[], None]] = []

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback`, synchronously, when everything that was taken may be another's from now on."""
        self._on_lost.append(callback)

    def lost(self) -> None:
        for callback in self._on_lost:
            callback()

    async def take(self, name: str) -> bool:
        """Take `name` unless another process has it; return whether it is ours. Raises EtcdUnavailable, LeaseLost."""
        async with self._lock:
            lease = self._lease
            if not lease or not await self._etcd.replace(self._prefix + name, self._holder, mod_revision=0, lease=lease):
                return False
            self._taken[name] = lease
            self._unreleased.discard(name)
            return lease == self._lease  # otherwise it was lost meanwhile, and `on_lost` was called too early for this name

    async def release(self, name: str) -> None:
        """Let others take `name`. Raises EtcdUnavailable; then `release_again` does so."""
        async with self._lock:
            self._unreleased.add(name)
            await self._release(name)

    async def _release(self, name: str) -> None:
        try:
            if self._is_held(name):
                await self._delete(self._prefix + name)
        except BaseException:
            self._has_failed.set()
            raise
        self._taken.pop(name, None)
        self._unreleased.discard(name)

    async def _delete(self, key: str) -> None:
        """Delete a key unless it is another process's: it may be, if ours alone was lost."""
        for kv in (await self._etcd.range(key)).kvs:
            if kv.value == self._holder:
                await self._etcd.remove(key, mod_revision=kv.mod_revision)

    async def keep(self) -> None:
        """Put back keys that are lost though their lease is not, until cancelled; notice those that are another process's."""
        await follow("leases", partial(self._etcd.watch, self._prefix), self._apply)

    async def _apply(self, change: Reset | Events) -> None:
        match change:
            case Reset(kvs):
                doubtful = {*self._taken} - {self._name_of(kv.key) for kv in kvs if kv.value == self._holder}
            case Events(events):
                gone = [event.key if isinstance(event, Deleted) else event.kv.key for event in events if not self._is_own(event)]
                doubtful = {self._name_of(key) for key in gone}
        for name in doubtful:
            await self._check(name)

    def _is_own(self, event: Put | Deleted) -> bool:
        return isinstance(event, Put) and event.kv.value == self._holder

    def _name_of(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    async def _check(self, name: str) -> None:
        """Put back the key of a name that is taken, if it is absent; call `on_lost` if it is another process's."""
        async with self._lock:
            if not self._is_held(name):
                return
            try:
                if await self._etcd.replace(self._prefix + name, self._holder, mod_revision=0, lease=self._taken[name]):
                    return
            except LeaseLost:
                return  # which the session notices
            del self._taken[name]
        log.warning("the lease of %s is another process's now, though it was not given back", name)
        self.lost()

    def _is_held(self, name: str) -> bool:
        """Return whether a name was taken under the lease that is held; otherwise it may be another process's."""
        return self._taken.get(name, 0) == self._lease != 0

    async def release_again(self) -> None:
        """Release what could not be released, as while etcd was away, until cancelled."""
        while True:
            await self._has_failed.wait()
            await asyncio.sleep(RETRY_S)
            self._has_failed.clear()
            for name in [*self._unreleased]:
                try:
                    async with self._lock:
                        if name in self._unreleased:  # it may have been taken again meanwhile
                            await self._release(name)
                except DynamoError as error:
                    log.debug("the lease of %s could not be given back: %s", name, error)
                    break

    @property
    def _lease(self) -> int:
        return 0 if self.session is None else self.session.lease


@asynccontextmanager
async def open_leases(etcd: Etcd, prefix: str, ttl_s: float = _TTL_S) -> AsyncIterator[Leases]:
    """Keep a lease while the body runs; at its end all that was taken is free. Does not wait for etcd.

    `ttl_s`: what was taken is free so long after a process died silently.
    """
    leases = Leases(etcd, prefix)
    async with (
        etcd.session(ttl_s, on_lost=leases.lost) as leases.session,
        running(leases.release_again(), "leases to give back"),
        running(leases.keep(), "keys of leases"),
    ):
        yield leases
