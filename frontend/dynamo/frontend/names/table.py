"""The names of a namespace in etcd: one key, which every frontend follows and any of them may change.

It is one key so that a change is checked against the whole table, and put only if the table has not changed meanwhile.
Without etcd the last table stays in use. If etcd comes back without its data, the first frontend to notice puts it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import msgspec

from dynamo.common.background import running
from dynamo.common.errors import DynamoError, Unavailable
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.transport import backoff
from dynamo.common.names import model_names_key
from dynamo.frontend.names.rules import Rule, Rules, check_rules

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0
_ATTEMPTS = 5
"""To change the table while others do so as well."""

Change = Callable[[dict[str, Rule]], None]
"""Changes a copy of the table in place. May raise DynamoError."""


class NameTable:
    """The rules by name. Lookups are served from memory."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self.rules: Mapping[str, Rule] = {}
        self.ready = asyncio.Event()
        """Set once the table has been read, or etcd refused to show it."""
        self._etcd = etcd
        self._key = model_names_key(namespace)
        self._revision = 0
        """At which the key was changed last; 0: there is no table."""
        self._is_lost = False
        """Whether etcd came back without its data, and the table has not been put back since."""

    def __repr__(self) -> str:
        return f"<NameTable {self._key} with {len(self.rules)} names at revision {self._revision}>"

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        pauses = backoff(LONGEST_PAUSE_S)
        while True:
            try:
                async with aclosing(self._etcd.watch(self._key)) as changes:
                    async for change in changes:
                        pauses = backoff(LONGEST_PAUSE_S)
                        await self._apply(change)
                        self.ready.set()
            except DynamoError as error:
                log.error("the names of models cannot be followed; retrying: %s", error)
                self.ready.set()
            await asyncio.sleep(next(pauses))

    async def change(self, change: Change) -> None:
        """Change the table for all frontends. Raises InvalidRequest for a table that is not valid, Unavailable without etcd."""
        for _ in range(_ATTEMPTS):
            current, revision = await self._read()
            rules = dict(current)
            change(rules)
            check_rules(rules)
            value = msgspec.json.encode(Rules(rules))
            if await self._etcd.replace(self._key, value, mod_revision=revision):
                await self._read()
                return
        raise Unavailable("the names are being changed by others at the same time; try again")

    async def _read(self) -> tuple[Mapping[str, Rule], int]:
        """Read the table now instead of waiting for the watch."""
        listing = await self._etcd.range(self._key)
        self._take_over(listing.kvs[0] if listing.kvs else None)
        return self.rules, self._revision

    async def _apply(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            kv = next((kv for kv in change.kvs if kv.key == self._key), None)
            if change.history_lost:
                self._revision = 0
                self._is_lost = bool(self.rules)
            if kv is None and self._is_lost:
                log.warning("etcd has lost the names of models; they are put back")
                await self._etcd.replace(self._key, msgspec.json.encode(Rules(dict(self.rules))), mod_revision=0)
                self._is_lost = False
                return
            self._is_lost = False
            self._take_over(kv)
            return
        for event in change.events:
            if isinstance(event, Put) and event.kv.key == self._key:
                self._take_over(event.kv)
            elif not isinstance(event, Put) and event.key == self._key and event.revision > self._revision:
                self.rules, self._revision = {}, 0

    def _take_over(self, kv: KeyValue | None) -> None:
        """Replace the table, unless a newer one has been read. One that is not valid changes nothing."""
        if kv is None:
            self.rules, self._revision = {}, 0
            return
        if kv.mod_revision <= self._revision:
            return
        self._revision = kv.mod_revision
        try:
            rules = msgspec.json.decode(kv.value, type=Rules).rules
            check_rules(rules)
        except (ValueError, RecursionError, DynamoError) as error:  # text that is not UTF-8 is a ValueError, too
            log.error("the names of models at %s are not valid, and those before stay in use: %s", kv.key, error)
            return
        if rules != self.rules:
            log.info("%d names of models are in use", len(rules))
        self.rules = rules


@asynccontextmanager
async def open_names(etcd: Etcd, namespace: str) -> AsyncIterator[NameTable]:
    """Follow the names of a namespace while the body runs. Does not wait for etcd: see `ready`."""
    table = NameTable(etcd, namespace)
    async with running(table.follow(), "names of models"):
        yield table
