"""The snapshot that a KV history begins with: the blocks of a component's instances up to one number of the record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.kv.tiers import TierChange
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


def fold(snapshot: KvSnapshot | None, updates: Sequence[KvUpdate]) -> KvSnapshot | None:
    """Return the blocks of an instance after `updates`, which may be in any order; None if an update is missing.

    `snapshot` is the state before, None if unknown. About 0.2 µs per block.
    """
    follower = Follower(max_kept=len(updates) + 1)
    blocks: dict[int, None] = {}  # ordered sets: parents stay before their children
    tiers: dict[str, dict[int, None]] = {}
    if snapshot is not None:
        follower.snapshot(snapshot)
        blocks = dict.fromkeys(snapshot.hashes)
        tiers = {change.name: dict.fromkeys(change.stored_hashes) for change in snapshot.tiers}
    for update in updates:
        for ready in follower.update(update):
            if ready.cleared:
                blocks.clear()
                tiers.clear()
            _apply(blocks, ready)
            for change in ready.tiers:
                _apply(tiers.setdefault(change.name, {}), change)
    if follower.number is None or follower.is_behind:
        return None
    slow = tuple([TierChange(name, pack_hashes(held)) for name, held in tiers.items() if held])
    return KvSnapshot(follower.number, pack_hashes(blocks), slow)


def _apply(blocks: dict[int, None], change: KvUpdate | TierChange) -> None:
    for block in change.removed_hashes:
        blocks.pop(block, None)
    blocks.update(dict.fromkeys(change.stored_hashes))
