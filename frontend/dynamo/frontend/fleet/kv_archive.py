"""What the instances of a component held at one place of their recorded events: the snapshot that a history begins with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import pack_hashes
from dynamo.frontend.fleet.kv_follow import Follower


class Archived(msgspec.Struct, frozen=True, array_like=True):
    """One model of one instance."""

    instance: int
    model: str
    snapshot: KvSnapshot


class Archive(msgspec.Struct, frozen=True, array_like=True):
    """All of a component. Recorded events up to number `sequence` of the record are part of it."""

    sequence: int = 0
    parts: Sequence[Archived] = ()


archive_encoder = msgspec.msgpack.Encoder()
archive_decoder = msgspec.msgpack.Decoder(Archive)


def fold(snapshot: KvSnapshot | None, updates: Sequence[KvUpdate]) -> KvSnapshot | None:
    """What an instance holds after `updates`, in whatever order they came; None if something is missing among them.

    `snapshot` is what it held before, None if that is not known. About 0.2 µs per block.
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
    if follower.number is None or follower.behind:
        return None
    return KvSnapshot(follower.number, pack_hashes(blocks))
