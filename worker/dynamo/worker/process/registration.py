"""A worker's registrations in etcd: put under its lease, put again when that was lost, gone when it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from dynamo.common.discovery import WITHDRAWN, Instance, encode_registration
from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.etcd import Etcd, LeaseSession
from dynamo.common.etcd.transport import backoff
from dynamo.common.process.background import running
from dynamo.common.repository import RepositoryInstance

Registered: TypeAlias = Instance | RepositoryInstance
"""What may be put under a worker's lease."""

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
CHECK_S = 30.0
_DEREGISTER_TIMEOUT_S = 2.0


class Registration:
    """What this process wants registered, and whether it is. Instance ids stay the same when a lease is lost."""

    def __init__(self, etcd: Etcd, instances: Sequence[Registered] = (), check_s: float = CHECK_S) -> None:
        self.registered = asyncio.Event()
        """Set while etcd holds what is wanted, as of the last check."""
        self._etcd = etcd
        self._check_s = check_s
        self._session: LeaseSession | None = None
        self._wanted = _to_registrations(instances)
        self._stored: dict[str, bytes] = {}
        """The keys and values put under the present lease."""
        self._present: set[str] = set()
        """Keys that may be in etcd, including those of failed attempts."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Registration of {sorted(self._wanted)}, registered={self.registered.is_set()}>"

    async def update(self, instances: Sequence[Registered], timeout_s: float = 5.0) -> bool:
        """Register `instances` from now on instead of the former ones. Return True when etcd has them.

        Return False if that happens later: when etcd is back, if it was away for `timeout_s`, or when `kept` is entered.
        Raises InvalidRequest, changing nothing.
        """
        wanted = _to_registrations(instances)
        if wanted != self._wanted:
            self._wanted = wanted
            self.registered.clear()
            self._changed.set()
        if self._session is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self.registered.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def kept(self, ttl_s: float = LEASE_TTL_S) -> AsyncIterator[None]:
        """Keep etcd as wanted while the body runs, under one lease of `ttl_s` seconds. Entered once.

        Does not wait for etcd: while it is away, attempts go on in the background.
        """
        async with self._etcd.session(ttl_s, self._on_held, self._on_lost) as session:
            self._session = session
            try:
                async with running(self._keep(session), "registration"):
                    yield
            finally:
                await self._withdraw(session)

    def _on_held(self, lease: int) -> None:
        """The session granted a lease: put all keys under it."""
        self._stored.clear()
        self._changed.set()

    def _on_lost(self) -> None:
        """The session lost its lease: the keys may be gone."""
        self.registered.clear()

    async def _keep(self, session: LeaseSession) -> None:
        """Make etcd equal to what is wanted whenever one of them has changed, until cancelled."""
        pauses = backoff(self._etcd.config.max_backoff_s)
        failing = False
        while True:
            try:
                async with asyncio.timeout(self._check_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # no change is known, but a key may have been deleted
            self._changed.clear()
            try:
                if self.registered.is_set():
                    await self._check()
                await self._store(session)
            except DynamoError as error:
                if not failing:
                    log.warning("the registrations cannot be written; trying again: %s", error)
                failing = True
                await asyncio.sleep(next(pauses))
                self._changed.set()
            else:
                failing = False
                pauses = backoff(self._etcd.config.max_backoff_s)

    async def _withdraw(self, session: LeaseSession) -> None:
        """Delete the registrations, so that no further requests arrive. Without etcd, they expire with their lease."""
        self.registered.clear()
        lease = session.lease
        if not lease:
            return
        try:
            async with asyncio.timeout(_DEREGISTER_TIMEOUT_S):
                for key in sorted(self._present):
                    await self._delete(key, lease)
        except (DynamoError, TimeoutError) as error:
            why = str(error) or "no response in time"
            log.warning("the registrations could not be deleted; they end with their lease: %s", why)

    async def _store(self, session: LeaseSession) -> None:
        lease = session.lease
        if not lease:
            return  # `_on_held` follows
        for key in sorted(self._present - self._wanted.keys()):
            await self._delete(key, lease)
        for key, value in list(self._wanted.items()):
            if self._stored.get(key) == value:
                continue
            self._present.add(key)
            await self._etcd.put(key, value, lease=lease)
            if session.lease != lease:
                return  # `_on_held` was called, or will be: all keys are put again
            self._stored[key] = value
        if self._stored == self._wanted and not self.registered.is_set():
            log.info("registered %s", ", ".join(self._wanted) or "nothing")
            self.registered.set()

    async def _delete(self, key: str, lease: int) -> None:
        """Withdraw one registration: frontends keep one that disappears without a word for a while, since it may have expired."""
        self._stored.pop(key, None)
        await self._etcd.put(key, WITHDRAWN, lease=lease)
        await self._etcd.delete(key)
        self._present.discard(key)

    async def _check(self) -> None:
        for key, value in list(self._stored.items()):
            kvs = (await self._etcd.range(key)).kvs
            if not kvs or kvs[0].value != value:
                log.warning("the registration %s was gone or changed; it is written again", key)
                self._stored.pop(key, None)
                self.registered.clear()


@asynccontextmanager
async def registered(
    etcd: Etcd, instances: Sequence[Registered], *, ttl_s: float = LEASE_TTL_S, check_s: float = CHECK_S
) -> AsyncIterator[Registration]:
    """Make `instances` visible to frontends while the body runs, all under one lease.

    Does not wait for etcd: while it is away, attempts go on in the background. `ttl_s` is how long frontends still see an
    instance that died silently; etcd's minimum is 2 s with its default settings. Raises InvalidRequest for an invalid card.
    """
    registration = Registration(etcd, instances, check_s)
    async with registration.kept(ttl_s):
        yield registration


def _to_registrations(instances: Sequence[Registered]) -> dict[str, bytes]:
    wanted = {
        entry.key: entry.encode() if isinstance(entry, RepositoryInstance) else encode_registration(entry) for entry in instances
    }
    if len(wanted) != len(instances):
        raise InvalidRequest("two registrations of one instance name the same model")
    return wanted
