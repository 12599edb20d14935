"""How many instances a planner wants, as a key in etcd says it. Without etcd the last known targets are shown."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from dynamo.common.etcd import Etcd, Events, Put, Reset
from dynamo.common.etcd.follow import follow
from dynamo.common.process.background import running
from dynamo.common.scaling.targets import Targets, decode_targets, targets_key

log = logging.getLogger(__name__)


class TargetsView:
    """The targets of a namespace."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self.targets = Targets()
        self._etcd = etcd
        self._key = targets_key(namespace)

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        await follow("targets of the planner", partial(self._etcd.watch, self._key), self.apply)

    def apply(self, change: Reset | Events) -> None:
        """Take over a change. Targets that are not valid change nothing."""
        if isinstance(change, Reset):
            values = {kv.key: kv.value for kv in change.kvs}
            self._use(values.get(self._key))
            return
        for event in change.events:
            if isinstance(event, Put) and event.kv.key == self._key:
                self._use(event.kv.value)
            elif not isinstance(event, Put) and event.key == self._key:
                self._use(None)

    def _use(self, value: bytes | None) -> None:
        try:
            self.targets = Targets() if value is None else decode_targets(value)
        except (ValueError, RecursionError) as error:
            log.warning("the targets at %s are not valid, and those before are shown: %s", self._key, error)


@asynccontextmanager
async def open_targets(etcd: Etcd, namespace: str) -> AsyncIterator[TargetsView]:
    """Follow the targets while the body runs. Does not wait for etcd."""
    view = TargetsView(etcd, namespace)
    async with running(view.follow(), "targets of the planner"):
        yield view
