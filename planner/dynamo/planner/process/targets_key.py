"""The key in etcd that holds the targets, written by the leader alone.

A leader reads the key when it begins, and then expects what it read, or wrote itself. So a former leader that does not know yet
that it is none, as after a pause of its machine, changes nothing: a new leader has written since.
"""

from __future__ import annotations

import logging

from dynamo.common.etcd import Etcd
from dynamo.common.scaling.targets import Targets, decode_targets, encode_targets, targets_key

log = logging.getLogger(__name__)


class TargetsKey:
    """The targets of one namespace."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self._etcd = etcd
        self._key = targets_key(namespace)
        self._expected = 0
        """The revision of the last change of the key by another process; 0: there was no key."""

    async def read(self) -> Targets:
        """Return what is there, and expect it at the next write; empty if there is nothing. Raises EtcdUnavailable."""
        targets, self._expected = await self._read()
        return targets

    async def write(self, targets: Targets) -> bool:
        """Put the targets, unless they are there already. Return False if another process has changed the key meanwhile.

        Raises EtcdUnavailable.
        """
        present, revision = await self._read()
        if present == targets:
            return True
        if revision not in (0, self._expected) and present.planner != targets.planner:
            return False
        return await self._etcd.replace(self._key, encode_targets(targets), mod_revision=revision)

    async def _read(self) -> tuple[Targets, int]:
        """Return what is there, and the revision of its last change."""
        listing = await self._etcd.range(self._key)
        if not listing.kvs:
            return Targets(), 0
        [kv] = listing.kvs
        try:
            return decode_targets(kv.value), kv.mod_revision
        except (ValueError, RecursionError) as error:
            log.error("the targets at %s cannot be read, and are replaced: %s", self._key, error)
            return Targets(), kv.mod_revision
