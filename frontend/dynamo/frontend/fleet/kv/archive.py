"""The snapshot that a KV history begins with: the blocks of a component's instances up to one number of the record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import HASH_BYTES, pack_hashes
from dynamo.common.kv.tiers import MAX_TIER_CHANGES, TierChange
from dynamo.frontend.fleet.kv.follow import Follower


class Archived(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one model of one instance."""

    instance: int
    model: str
    snapshot: KvSnapshot


class Archive(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of all instances of a component, with recorded events up to number `sequence` applied."""

    sequence: int = 0
    parts: Sequence[Archived] = ()


archive_encoder = msgspec.msgpack.Encoder()
archive_decoder = msgspec.msgpack.Decoder(Archive)


def cut(snapshot: KvSnapshot, most: int) -> KvSnapshot:
    """Return a snapshot with its first `most` blocks."""
    if snapshot.hash_bytes <= most * HASH_BYTES:
        return snapshot
    left = most * HASH_BYTES - len(snapshot.blocks)
    tiers: list[TierChange] = []
    for change in snapshot.tiers:
        if left > 0:
            tiers.append(TierChange(change.name, stored=change.stored[:left]))
            left -= len(change.stored)
    return KvSnapshot(snapshot.number, snapshot.blocks[: most * HASH_BYTES], tuple(tiers))


def fold(snapshot: KvSnapshot | None, updates: Sequence[KvUpdate], most: int) -> KvSnapshot | None:
    """Return the blocks of an instance after `updates`, which may be in any order; None if an update is missing.

    `snapshot` is the state before, None if unknown. Of more than `most` blocks, the last ones are left out. About 0.2 µs a block.
    """
    follower = Follower(max_kept=len(updates) + 1)
    held = _Held(most)
    if snapshot is not None:
        follower.snapshot(snapshot)
        held.blocks = dict.fromkeys(snapshot.hashes)
        held.tiers = {change.name: dict.fromkeys(change.stored_hashes) for change in snapshot.tiers}
    for update in updates:
        for ready in follower.update(update):
            held.apply(ready)
    if follower.number is None or follower.is_behind:
        return None
    slow = tuple([TierChange(name, pack_hashes(blocks)) for name, blocks in held.tiers.items() if blocks])
    return cut(KvSnapshot(follower.number, pack_hashes(held.blocks), slow), most)


class _Held:
    """The blocks of an instance, in ordered sets: parents stay before their children."""

    def __init__(self, most: int) -> None:
        self.blocks: dict[int, None] = {}
        self.tiers: dict[str, dict[int, None]] = {}
        self._most = most

    def apply(self, update: KvUpdate) -> None:
        if update.cleared:
            self.blocks.clear()
            self.tiers.clear()
        self._change(self.blocks, update)
        for change in update.tiers:
            if change.name in self.tiers or len(self.tiers) < MAX_TIER_CHANGES:
                self._change(self.tiers.setdefault(change.name, {}), change)

    def _change(self, blocks: dict[int, None], change: KvUpdate | TierChange) -> None:
        for block in change.removed_hashes:
            blocks.pop(block, None)
        room = self._most - len(self.blocks) - sum(map(len, self.tiers.values()))
        stored = change.stored_hashes
        if len(stored) > room:
            stored = [block for block in stored if block not in blocks][: max(0, room)]
        blocks.update(dict.fromkeys(stored))
