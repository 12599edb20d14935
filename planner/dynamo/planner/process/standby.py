"""Records in etcd of the models that can be started: so frontends take requests for those without an instance.

The leader has one for each pool that it scales, with the card of the instance that registered last. A record that an operator
deletes while the pool has no instance gives the pool up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from dynamo.common.errors import InvalidRequest
from dynamo.common.etcd import Etcd
from dynamo.common.names import standby_prefix
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, decode_standby, delete_standby, put_standby
from dynamo.planner.observe.fleet import PoolWatch

log = logging.getLogger(__name__)

LIST_EVERY_S = 30.0
"""Records are compared with those in etcd so often."""
_SAME_START = 0.25
"""A startup time that differs by less is not worth a write."""


class StandbyRecords:
    """The records of one namespace."""

    def __init__(self, etcd: Etcd, namespace: str, watch: PoolWatch) -> None:
        self._etcd = etcd
        self._namespace = namespace
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._written: dict[Pool, Standby] = {}
        self._unfit: dict[Pool, Standby] = {}
        """Records that etcd cannot hold, which has been logged."""
        self._revision = 0
        self._listed_at = self._loop.time()

    async def take_over(self) -> None:
        """Follow the pools that have a record, as the last leader did. Raises EtcdUnavailable."""
        self._written = await self._list()
        for pool, standby in self._written.items():
            self._watch.remember(pool, standby)
            if not self._watch.follows(pool):
                log.info("%s is not scaled any more: requests for it are taken only while it has an instance", pool)
                await delete_standby(self._etcd, self._namespace, pool)
        self._written = {pool: standby for pool, standby in self._written.items() if self._watch.follows(pool)}

    async def keep(self) -> Sequence[Pool]:
        """Write the records that have changed. Return the pools that an operator has given up. Raises EtcdUnavailable."""
        given_up: Sequence[Pool] = ()
        if self._loop.time() - self._listed_at >= LIST_EVERY_S:
            given_up = await self._compare()
        for pool in self._watch.pools():
            standby = self._watch.standby(pool)
            if standby is not None and not _is_same(standby, self._written.get(pool)) and self._unfit.get(pool) != standby:
                await self._put(pool, standby)
        return given_up

    async def _compare(self) -> Sequence[Pool]:
        """Notice records that are gone: those of pools without an instance are given up, the others are put again."""
        before = self._revision
        listed = await self._list()
        is_older = self._revision < before
        gone = [pool for pool in self._written if pool not in listed]
        self._written = {pool: standby for pool, standby in self._written.items() if pool in listed}
        given_up = [] if is_older else [pool for pool in gone if not self._watch.serves(pool)]
        for pool in given_up:
            log.info("%s is given up: its record was deleted while it had no instance", pool)
            self._watch.forget(pool)
        return given_up

    async def _list(self) -> dict[Pool, Standby]:
        listing = await self._etcd.range(standby_prefix(self._namespace), prefix=True)
        self._revision, self._listed_at = listing.revision, self._loop.time()
        records: dict[Pool, Standby] = {}
        for kv in listing.kvs:
            try:
                standby = decode_standby(kv.key, kv.value)
            except InvalidRequest as error:
                log.warning("the record of a model at %s is ignored: %s", kv.key, error)
                continue
            records[standby.pool] = standby
        return records

    async def _put(self, pool: Pool, standby: Standby) -> None:
        try:
            await put_standby(self._etcd, standby)
        except InvalidRequest as error:
            log.error("requests for %s are taken only while it has an instance: %s", pool, error)
            self._unfit[pool] = standby
        else:
            self._written[pool] = standby


def _is_same(new: Standby, old: Standby | None) -> bool:
    if old is None or replace(new, start_s=0.0) != replace(old, start_s=0.0):
        return False
    return abs(new.start_s - old.start_s) <= _SAME_START * old.start_s
