"""What a worker tells about its KV cache: which blocks came and went, by sequence hash.

A worker keeps a `KvState`: its own full copy, fed by the engine. Once per engine step it takes the net change as one numbered
`KvUpdate`. Numbers count from 0 per instance without holes, so a reader knows what it missed; `KvSnapshot` is the whole copy
as of one number. Applying the same update twice changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.common.kv.hashes import HASH_BYTES, pack_hashes, unpack_hashes

MAX_UPDATE_BLOCKS = 1 << 16
"""More blocks at once travel as several updates: nats-server cuts a connection that sends longer messages than it takes."""


class KvUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One step's net change. To be applied in this order: `cleared`, `removed`, `stored`."""

    number: int
    stored: bytes = b""
    """Sequence hashes, see `pack_hashes`; parents before children."""
    removed: bytes = b""
    cleared: bool = False

    @property
    def stored_hashes(self) -> list[int]:
        return unpack_hashes(self.stored)

    @property
    def removed_hashes(self) -> list[int]:
        return unpack_hashes(self.removed)


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All blocks that an instance holds after its update `number`; -1: it has made none yet."""

    number: int = -1
    blocks: bytes = b""

    @property
    def hashes(self) -> list[int]:
        return unpack_hashes(self.blocks)


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is with the requests of all frontends, at one moment."""

    waiting: int = 0
    running: int = 0
    active_blocks: int = 0
    """KV blocks that running requests hold, shared ones counted once."""
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens of accepted requests that are still to be computed."""
    step_ms: float = 0.0
    kv_number: int = -1
    """Number of the last KV update made; a reader that is behind missed the end of the stream."""
    accepted: bytes = b""
    """`request_key` of each request accepted since the report before the last one, packed: these are part of this report."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1; 0 where their number is not known."""
        return min(self.active_blocks / self.total_blocks, 1.0) if self.total_blocks else 0.0


def request_key(request_id: str) -> int:
    """A request's name in load reports and shared bookings: 8 bytes instead of a long id."""
    return xxh3_64_intdigest(request_id.encode())


snapshot_decoder = msgspec.msgpack.Decoder(KvSnapshot)


class KvChange:
    """A net change of a set of blocks, gathered from single ones: what came and went in between leaves no trace.

    Never larger than the blocks held before and after together, however long it gathers.
    """

    __slots__ = ("cleared", "removed", "stored")

    def __init__(self) -> None:
        # Dictionaries as ordered sets: readers get parents before children.
        self.stored: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        self.cleared = False

    def __bool__(self) -> bool:
        return self.cleared or bool(self.stored) or bool(self.removed)

    def store(self, blocks: Iterable[int]) -> None:
        """`blocks` were absent and are present now."""
        _move(blocks, self.removed, self.stored)

    def remove(self, blocks: Iterable[int]) -> None:
        """`blocks` were present and are absent now."""
        _move(blocks, self.stored, self.removed)

    def clear(self) -> None:
        """Everything is absent now."""
        self.stored.clear()
        self.removed.clear()
        self.cleared = True

    def take_removed(self, limit: int) -> list[int]:
        """The first `limit` removed blocks, which are part of the change no more."""
        return _take(self.removed, limit)

    def take_stored(self, limit: int) -> list[int]:
        return _take(self.stored, limit)


def _move(blocks: Iterable[int], undone: dict[int, None], done: dict[int, None]) -> None:
    """Notes `blocks` in `done`, or takes them out of its opposite."""
    if not undone:
        done.update(dict.fromkeys(blocks))
        return
    for block in blocks:
        if block in undone:
            del undone[block]
        else:
            done[block] = None


def _take(blocks: dict[int, None], limit: int) -> list[int]:
    if len(blocks) <= limit:
        taken = list(blocks)
        blocks.clear()
        return taken
    taken = list(islice(blocks, limit))
    for block in taken:
        del blocks[block]
    return taken


class KvState:
    """A worker's own full copy of what its engine caches, and the numbered updates that others follow it by.

    An engine with several data-parallel ranks names the rank of each change: a block counts as held while any rank holds it.
    The latest updates are kept for readers that missed a few, as many as fit into `log_bytes`.
    """

    def __init__(self, log_bytes: int = 4 << 20) -> None:
        self._ranks: dict[int, dict[int, None]] = {}
        """What each rank holds: dictionaries as ordered sets."""
        self._change = KvChange()
        self._next = 0
        self._log: deque[KvUpdate] = deque()
        self._log_bytes = 0
        self._log_limit_bytes = log_bytes

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self.held())

    def __contains__(self, block: int) -> bool:
        return any(block in held for held in self._ranks.values())

    def held(self) -> Collection[int]:
        """Return the blocks that are cached, parents before children."""
        if len(self._ranks) == 1:
            return next(iter(self._ranks.values())).keys()
        return dict.fromkeys(chain.from_iterable(self._ranks.values())).keys()

    @property
    def number(self) -> int:
        """Number of the last update taken; -1: none."""
        return self._next - 1

    @property
    def changed(self) -> bool:
        """`take_update` would return one."""
        return bool(self._change)

    def store(self, blocks: Iterable[int], rank: int = 0) -> None:
        """Parents before children. Blocks already there are left alone."""
        own = self._ranks.setdefault(rank, {})
        new = dict.fromkeys([block for block in blocks if block not in own])
        own.update(new)
        self._change.store(self._nowhere_else(new, rank))

    def remove(self, blocks: Iterable[int], rank: int = 0) -> None:
        """Blocks that are not there are left alone."""
        own = self._ranks.setdefault(rank, {})
        gone = dict.fromkeys([block for block in blocks if block in own])
        for block in gone:
            del own[block]
        self._change.remove(self._nowhere_else(gone, rank))

    def clear(self, rank: int = 0) -> None:
        own = self._ranks.get(rank)
        if own is not None and len(self._ranks) > 1:
            self.remove(list(own), rank)
        elif own:
            own.clear()
            self._change.clear()

    def _nowhere_else(self, blocks: Iterable[int], rank: int) -> Iterable[int]:
        """Those of `blocks` that no other rank holds."""
        if len(self._ranks) == 1:
            return blocks
        others = [held for number, held in self._ranks.items() if number != rank]
        return [block for block in blocks if not any(block in held for held in others)]

    def take_update(self) -> KvUpdate | None:
        """The net change since the last call, numbered; None if there is none. What is too much for one leaves a rest."""
        change = self._change
        if not change:
            return None
        removed = change.take_removed(MAX_UPDATE_BLOCKS)
        stored = change.take_stored(MAX_UPDATE_BLOCKS - len(removed))
        update = KvUpdate(self._next, pack_hashes(stored), pack_hashes(removed), change.cleared)
        change.cleared = False
        self._next += 1
        self._log.append(update)
        self._log_bytes += _weight(update)
        while self._log_bytes > self._log_limit_bytes:
            self._log_bytes -= _weight(self._log.popleft())
        return update

    def tell_again(self) -> None:
        """Makes the next update one that clears everything and stores what is held: readers need none of those before it."""
        self._change = KvChange()
        self._change.clear()
        self._change.stored = dict.fromkeys(self.held())

    def since(self, number: int) -> Sequence[KvUpdate] | None:
        """Every update from `number` on, or None if some of them are no longer kept: then a snapshot is needed."""
        first = self._next - len(self._log)
        if not first <= number <= self._next:
            return None
        return [update for update in self._log if update.number >= number]

    def snapshot(self) -> KvSnapshot:
        """All blocks as of `number`: changes not yet taken as an update are left out."""
        change = self._change
        if not change:
            return KvSnapshot(self.number, pack_hashes(self.held()))
        if change.cleared:
            # What was there before the clear is forgotten. Readers get the state after it now and the update, which changes
            # nothing for them, later.
            return KvSnapshot(self.number, pack_hashes(self.held()))
        published = [block for block in self.held() if block not in change.stored]
        published.extend(change.removed)
        return KvSnapshot(self.number, pack_hashes(published))


def _weight(update: KvUpdate) -> int:
    """Bytes that a kept update costs, about."""
    return len(update.stored) + len(update.removed) + 16 * HASH_BYTES


class KvMessage(msgspec.Struct, frozen=True, array_like=True):
    """What an instance publishes on its KV subject."""

    model: str
    update: KvUpdate


class LoadMessage(msgspec.Struct, frozen=True, array_like=True):
    """What an instance publishes on its load subject."""

    model: str
    report: LoadReport


class KvQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Asks an instance for a model's snapshot, or for its updates from a number on."""

    model: str
    since: int = 0


def read_message(payload: bytes | memoryview) -> KvMessage:
    """A KvMessage off the bus or out of a record. Raises ValueError, which a half hash is, too."""
    message: KvMessage = _kv_message_decoder.decode(payload)
    if (len(message.update.stored) | len(message.update.removed)) % HASH_BYTES:
        raise ValueError("its blocks are no whole number of hashes")
    return message


message_encoder = msgspec.msgpack.Encoder()
_kv_message_decoder = msgspec.msgpack.Decoder(KvMessage)
load_message_decoder = msgspec.msgpack.Decoder(LoadMessage)
question_decoder = msgspec.msgpack.Decoder(KvQuestion)
