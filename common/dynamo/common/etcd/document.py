"""One value in etcd that every process follows and any of them may change.

It lies in one key so that a change is checked against the whole value, and put only if that has not changed meanwhile.
Without etcd the last value stays in use. If etcd comes back without its data, the first process to notice puts it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from dynamo.common.errors import DynamoError, Unavailable
from dynamo.common.etcd.client import Etcd
from dynamo.common.etcd.follow import follow
from dynamo.common.etcd.kv import KeyValue
from dynamo.common.etcd.watch import Events, Put, Reset

log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""To change the value while others do so as well."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DocumentType(Generic[T]):
    """What a kind of document holds."""

    name: str
    """For log lines and errors; a plural."""
    empty: T
    """The value without a key in etcd."""
    encode: Callable[[T], bytes]
    """Raises DynamoError for a value that is not valid."""
    decode: Callable[[bytes], T]
    """Raises ValueError, RecursionError or DynamoError for bytes that are not valid."""


class EtcdDocument(Generic[T]):
    """The value of one key. Reading it is free: it is kept in memory."""

    def __init__(self, etcd: Etcd, key: str, kind: DocumentType[T], on_change: Callable[[T], None] = lambda value: None) -> None:
        """Call `on_change` with each new value."""
        self.value: T = kind.empty
        self.ready = asyncio.Event()
        """Set once the value has been read, or etcd refused to show it."""
        self._etcd = etcd
        self._key = key
        self._kind = kind
        self._on_change = on_change
        self._revision = 0
        """At which the key was changed last; 0: there is none."""
        self._is_lost = False
        """Whether etcd came back without its data, and the value has not been put back since."""

    def __repr__(self) -> str:
        return f"<EtcdDocument {self._key} at revision {self._revision}>"

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""

        async def apply(change: Reset | Events) -> None:
            await self._apply(change)
            self.ready.set()

        await follow(self._kind.name, partial(self._etcd.watch, self._key), apply, on_error=self.ready.set)

    async def change(self, change: Callable[[T], T]) -> None:
        """Replace the value by what `change` makes of it, for all processes.

        Raises what that raises, and Unavailable without etcd.
        """
        for _ in range(_ATTEMPTS):
            current, revision = await self._read()
            encoded = self._kind.encode(change(current))
            if await self._etcd.replace(self._key, encoded, mod_revision=revision):
                await self._read()
                return
        raise Unavailable(f"the {self._kind.name} are being changed by others at the same time; try again")

    async def _read(self) -> tuple[T, int]:
        """Read the value now instead of waiting for the watch."""
        listing = await self._etcd.range(self._key)
        self._take_over(listing.kvs[0] if listing.kvs else None)
        return self.value, self._revision

    async def _apply(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            kv = next((kv for kv in change.kvs if kv.key == self._key), None)
            if change.history_lost:
                self._revision = 0
                self._is_lost = self.value != self._kind.empty
            if kv is None and self._is_lost:
                log.warning("etcd has lost the %s; they are put back", self._kind.name)
                await self._etcd.replace(self._key, self._kind.encode(self.value), mod_revision=0)
                self._is_lost = False
                return
            self._is_lost = False
            self._take_over(kv)
            return
        for event in change.events:
            if isinstance(event, Put) and event.kv.key == self._key:
                self._take_over(event.kv)
            elif not isinstance(event, Put) and event.key == self._key and event.revision > self._revision:
                self._take_over(None)

    def _take_over(self, kv: KeyValue | None) -> None:
        """Replace the value, unless a newer one has been read. One that is not valid changes nothing."""
        if kv is None:
            self._revision = 0
            return self._use(self._kind.empty)
        if kv.mod_revision <= self._revision:
            return None
        self._revision = kv.mod_revision
        try:
            value = self._kind.decode(kv.value)
        except (ValueError, RecursionError, DynamoError) as error:  # text that is not UTF-8 is a ValueError, too
            log.error("the %s at %s are not valid, and those before stay in use: %s", self._kind.name, kv.key, error)
            return None
        return self._use(value)

    def _use(self, value: T) -> None:
        if value != self.value:
            self.value = value
            self._on_change(value)
