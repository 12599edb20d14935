"""Work that one process of the fleet does at a time: the one that puts a key into etcd first does it, until its lease ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo.common.etcd import Etcd, LeaseSession

_TTL_S = 10.0


class Leases:
    """What this process has taken, below one prefix; use `open_leases`."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.session: LeaseSession | None = None
        self._etcd = etcd
        self._prefix = prefix
        self._holder = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
        self._taken: dict[str, int] = {}
        """The lease under which each name was taken."""
        self._on_lost: list[Callable[[], None]] = []

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback`, synchronously, when everything that was taken may be another's from now on."""
        self._on_lost.append(callback)

    def lost(self) -> None:
        for callback in self._on_lost:
            callback()

    async def take(self, name: str) -> bool:
        """Take `name` unless another process has it; return whether it is ours. Raises EtcdUnavailable, LeaseLost."""
        lease = self._lease
        if not lease or not await self._etcd.replace(self._prefix + name, self._holder, mod_revision=0, lease=lease):
            return False
        self._taken[name] = lease
        return lease == self._lease  # otherwise it was lost meanwhile, and `on_lost` was called too early for this name

    async def release(self, name: str) -> None:
        """Let others take `name`. Raises EtcdUnavailable; then it is free when the lease ends."""
        lease = self._taken.pop(name, 0)
        if lease == self._lease != 0:  # otherwise it may be another's
            await self._etcd.delete(self._prefix + name)

    @property
    def _lease(self) -> int:
        return 0 if self.session is None else self.session.lease


@asynccontextmanager
async def open_leases(etcd: Etcd, prefix: str) -> AsyncIterator[Leases]:
    """Keep a lease while the body runs; at its end all that was taken is free. Does not wait for etcd."""
    leases = Leases(etcd, prefix)
    async with etcd.session(_TTL_S, on_lost=leases.lost) as leases.session:
        yield leases
