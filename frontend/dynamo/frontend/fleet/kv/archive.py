"""The snapshot that a KV history begins with: the blocks of a component's instances up to one number of the record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import pack_hashes
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
    blocks: dict[int, None] = {}  # an ordered set: parents stay before their children
    if snapshot is not None:
        follower.snapshot(snapshot)
        blocks = dict.fromkeys(snapshot.hashes)
    for update in updates:
        for ready in follower.update(update):
            if ready.cleared:
                blocks.clear()
            for block in ready.removed_hashes:
                blocks.pop(block, None)
            blocks.update(dict.fromkeys(ready.stored_hashes))
    if follower.number is None or follower.is_behind:
        return None
    return KvSnapshot(follower.number, pack_hashes(blocks))
