"""Models that can be started: a live view of the records that a planner puts into etcd, see `common.scaling.standby`.

Without etcd the last known records stay in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from dynamo.common.discovery import other_names
from dynamo.common.errors import DynamoError
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.follow import follow
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.names import standby_prefix
from dynamo.common.process.background import running
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, decode_standby

log = logging.getLogger(__name__)

MAX_RECORDS = 1024
"""Records that are used; more are left out, with a warning."""

OnStandby = Callable[[Sequence[ModelCard], Sequence[ModelCard]], None]


class StandbyView:
    """The models that can be started. Lookups are served from memory."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self.ready = asyncio.Event()
        """Set once the records have been read, or etcd refused to show them."""
        self._etcd = etcd
        self._prefix = standby_prefix(namespace)
        self._records: dict[str, tuple[Standby, int]] = {}
        """By key, each with the revision of the store at which it was put."""
        self._pools: Mapping[Pool, Standby] = {}
        self._cards: Mapping[str, ModelCard] = {}
        self._by_name: Mapping[str, ModelCard] = {}
        """Cards by the names, aliases and adapters of their models."""
        self._on_change: list[OnStandby] = []
        self._is_full = False
        """Whether records were left out when the last one was put."""

    def __repr__(self) -> str:
        return f"<StandbyView {self._prefix} {len(self._records)} records>"

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model, by its name, an alias or an adapter; None if it cannot be started."""
        return self._by_name.get(name)

    def cards(self) -> Mapping[str, ModelCard]:
        """Return the cards of the models that can be started, by name."""
        return self._cards

    def start_s(self, pool: Pool) -> float | None:
        """Return how long the last start of an instance took, 0 if none has been seen; None if the pool cannot be started."""
        standby = self._pools.get(pool)
        return None if standby is None else standby.start_s

    def on_change(self, callback: OnStandby) -> None:
        """Call `callback(added, removed)`, synchronously, with the cards of records; one that has changed is in both."""
        self._on_change.append(callback)

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        await follow("models on standby", partial(self._etcd.watch, self._prefix), self.apply, on_error=self.ready.set)

    def apply(self, change: Reset | Events) -> None:
        before = self._pools
        if isinstance(change, Reset):
            listed = {kv.key for kv in change.kvs}
            kept = self._records.items() if not change.history_lost else ()
            self._records = {key: record for key, record in kept if key in listed or record[1] > change.revision}
            for kv in change.kvs:
                self._put(kv)
        else:
            for event in change.events:
                if isinstance(event, Put):
                    self._put(event.kv)
                elif event.key in self._records and self._records[event.key][1] < event.revision:
                    del self._records[event.key]
        self._use(before)
        self.ready.set()

    def _put(self, kv: KeyValue) -> None:
        known = self._records.get(kv.key)
        if known is not None and known[1] >= kv.mod_revision:
            return
        if known is None and len(self._records) >= MAX_RECORDS:
            if not self._is_full:
                log.error("more than %d models are on standby: the one at %s and others are left out", MAX_RECORDS, kv.key)
            self._is_full = True
            return
        self._is_full = False
        try:
            self._records[kv.key] = decode_standby(kv.key, kv.value), kv.mod_revision
        except DynamoError as error:
            log.warning("the model on standby at %s is left out: %s", kv.key, error)
            self._records.pop(kv.key, None)

    def _use(self, before: Mapping[Pool, Standby]) -> None:
        """Make the lookups anew, and tell the subscribers what has changed since `before`."""
        self._pools = {standby.pool: standby for standby, _ in self._records.values()}
        # Instances that compute prompts for others do not make a model.
        cards = [pool.card for pool in map(self._pools.__getitem__, sorted(self._pools)) if pool.card.role is not Role.PREFILL]
        by_name: dict[str, ModelCard] = {}
        for card in cards:
            by_name.setdefault(card.name, card)
        self._cards = dict(by_name)
        for card in cards:
            for name in other_names(card):
                by_name.setdefault(name, card)
        self._by_name = by_name
        added = [new.card for pool, new in self._pools.items() if _card_of(before, pool) != new.card]
        removed = [old.card for pool, old in before.items() if _card_of(self._pools, pool) != old.card]
        if added or removed:
            for callback in self._on_change:
                callback(added, removed)


def _card_of(pools: Mapping[Pool, Standby], pool: Pool) -> ModelCard | None:
    return pools[pool].card if pool in pools else None


@asynccontextmanager
async def open_standby(etcd: Etcd, namespace: str) -> AsyncIterator[StandbyView]:
    """Follow the models that can be started while the body runs. Does not wait for etcd: see `ready`."""
    view = StandbyView(etcd, namespace)
    async with running(view.follow(), "models on standby"):
        yield view
