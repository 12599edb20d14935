"""KV cache events of a worker: which blocks were added and removed, by sequence hash.

A worker keeps a `KvState`: its own full copy, fed by the engine. Once per engine step it takes the net change as one numbered
`KvUpdate`. Numbers count from 0 per instance without gaps, so a reader knows what it missed; `KvSnapshot` is the whole copy
as of one number. Applying the same update twice changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from operator import add, sub
from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import astuple
from xxhash import xxh3_64_intdigest

from dynamo.common.kv.hashes import HASH_BYTES, pack_hashes, unpack_hashes

MAX_UPDATE_BLOCKS = 1 << 16
"""More blocks than this are split into several updates, since nats-server closes a connection that sends too long a message."""
_MAX_UPDATE_BYTES = MAX_UPDATE_BLOCKS * HASH_BYTES
# What readers accept, so that no instance can make others compute with infinities or less than nothing.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Sum: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class KvUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One step's net change, to be applied in the order `cleared`, `removed`, `stored`."""

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
    """All blocks that an instance caches after its update `number`; -1: before its first one."""

    number: int = -1
    blocks: bytes = b""

    @property
    def hashes(self) -> list[int]:
        return unpack_hashes(self.blocks)


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """What the steps of an engine have done since it started, so that readers learn how long a step takes.

    Each number is a sum over all steps. The difference of two totals describes the steps between them, also if reports between
    them were lost.
    """

    steps: _Count = 0
    seconds: _Duration = 0.0
    prefill_tokens: _Sum = 0
    """Prompt tokens computed. vLLM counts what it finds cached of a prompt before the prompt: below 0 for a while, or if it is
    cancelled."""
    sequences: _Count = 0
    """Sequences that decoded, summed over steps."""
    blocks: _Count = 0
    """KV blocks in use, summed over steps."""
    finished: _Count = 0
    """Sequences that ended."""
    generated: _Count = 0
    """Tokens that these had generated."""

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: StepTotals) -> StepTotals:
        return StepTotals(*map(sub, astuple(self), astuple(other)))


NO_STEPS = StepTotals()


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is with the requests of all frontends, at one moment."""

    waiting: _Count = 0
    running: _Count = 0
    active_blocks: _Count = 0
    """KV blocks that running requests hold, shared ones counted once."""
    total_blocks: _Count = 0
    queued_prefill_tokens: _Count = 0
    """Prompt tokens of accepted requests that are still to be computed."""
    step_ms: _Duration = 0.0
    kv_number: int = -1
    """Number of the last KV update; a reader that is behind it has missed updates."""
    accepted: bytes = b""
    """`request_key` of each request accepted since the report before the last one, packed. Their load is part of this report."""
    totals: StepTotals = NO_STEPS
    """Without a step: the engine does not measure its steps."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that running requests hold, 0 to 1; 0 if their number is unknown."""
        return min(self.active_blocks / self.total_blocks, 1.0) if self.total_blocks else 0.0


def request_key(request_id: str) -> int:
    """Return the key of a request in load reports and shared bookings: 8 bytes instead of a long id."""
    return xxh3_64_intdigest(request_id.encode())


snapshot_decoder = msgspec.msgpack.Decoder(KvSnapshot)


class KvChange:
    """A net change of a set of blocks. Blocks that were added and removed meanwhile are not in it.

    Never larger than the blocks cached before and after together, however many changes it gathers.
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
        """Add `blocks`, which were absent."""
        _move(blocks, self.removed, self.stored)

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove `blocks`, which were present."""
        _move(blocks, self.stored, self.removed)

    def clear(self) -> None:
        """Remove all blocks."""
        self.stored.clear()
        self.removed.clear()
        self.cleared = True

    def take_removed(self, limit: int) -> list[int]:
        """Take the first `limit` removed blocks out of the change and return them."""
        return _take(self.removed, limit)

    def take_stored(self, limit: int) -> list[int]:
        return _take(self.stored, limit)


def _move(blocks: Iterable[int], undone: dict[int, None], done: dict[int, None]) -> None:
    """Add `blocks` to `done`, or take them out of its opposite."""
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
    """A worker's own full copy of what its engine caches, and the numbered updates by which others follow it.

    An engine with several data-parallel ranks names the rank of each change: a block is cached while any rank caches it. The
    latest updates are kept for readers that missed some, as many as fit into `log_bytes`.
    """

    def __init__(self, log_bytes: int = 4 << 20) -> None:
        self._ranks: dict[int, dict[int, None]] = {}
        """The blocks of each rank: dictionaries as ordered sets."""
        self._change = KvChange()
        self._next = 0
        self._log: deque[KvUpdate] = deque()
        self._log_bytes = 0
        self._log_limit_bytes = log_bytes

    def __len__(self) -> int:
        """Return how many blocks are cached."""
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
        """Whether `take_update` would return an update."""
        return bool(self._change)

    def store(self, blocks: Iterable[int], rank: int = 0) -> None:
        """Add blocks, parents before children. Blocks that are present are skipped."""
        own = self._ranks.setdefault(rank, {})
        new = dict.fromkeys([block for block in blocks if block not in own])
        own.update(new)
        self._change.store(self._nowhere_else(new, rank))

    def remove(self, blocks: Iterable[int], rank: int = 0) -> None:
        """Remove blocks. Blocks that are absent are skipped."""
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
        """Yield the blocks that no other rank caches."""
        if len(self._ranks) == 1:
            return blocks
        others = [held for number, held in self._ranks.items() if number != rank]
        return [block for block in blocks if not any(block in held for held in others)]

    def take_update(self) -> KvUpdate | None:
        """Return the numbered net change since the last call, or None. A large change is split, and the rest remains."""
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

    def queue_full_update(self) -> None:
        """Make the next update one that clears everything and stores what is cached, so that readers need no earlier one."""
        self._change = KvChange()
        self._change.clear()
        self._change.stored = dict.fromkeys(self.held())

    def since(self, number: int) -> Sequence[KvUpdate] | None:
        """Return every update from `number` on, or None if some of them are no longer kept, so that a snapshot is needed."""
        first = self._next - len(self._log)
        if not first <= number <= self._next:
            return None
        return [update for update in self._log if update.number >= number]

    def snapshot(self) -> KvSnapshot:
        """Return all blocks as of `number`. Changes that were not taken as an update are left out."""
        change = self._change
        if not change:
            return KvSnapshot(self.number, pack_hashes(self.held()))
        if change.cleared:
            # The blocks before the clear are not known any more. Readers get the state after it now and the update, which changes
            # nothing for them, later.
            return KvSnapshot(self.number, pack_hashes(self.held()))
        published = [block for block in self.held() if block not in change.stored]
        published.extend(change.removed)
        return KvSnapshot(self.number, pack_hashes(published))


def _weight(update: KvUpdate) -> int:
    """Return about how many bytes a kept update takes."""
    return len(update.stored) + len(update.removed) + 16 * HASH_BYTES


class KvMessage(msgspec.Struct, frozen=True, array_like=True):
    """What an instance publishes on its KV subject."""

    model: str
    update: KvUpdate


class LoadMessage(msgspec.Struct, frozen=True, array_like=True):
    """What an instance publishes on its load subject."""

    model: str
    report: LoadReport


class KvQuery(msgspec.Struct, frozen=True, array_like=True):
    """A request for a model's snapshot, or for its updates from a number on."""

    model: str
    since: int = 0


def read_message(payload: bytes | memoryview) -> KvMessage:
    """Decode a KvMessage. Raises ValueError, also for a hash that is cut off and for too many of them."""
    message: KvMessage = _kv_message_decoder.decode(payload)
    stored, removed = len(message.update.stored), len(message.update.removed)
    if (stored | removed) % HASH_BYTES or stored + removed > _MAX_UPDATE_BYTES:
        check_update(message.update)
    return message


def check_update(update: KvUpdate) -> None:
    """Raise ValueError unless an update has whole hashes, and no more than one may have."""
    stored, removed = len(update.stored), len(update.removed)
    if (stored | removed) % HASH_BYTES:
        raise ValueError("its blocks are not a whole number of hashes")
    if stored + removed > _MAX_UPDATE_BYTES:
        raise ValueError(f"it has {(stored + removed) // HASH_BYTES} blocks; at most {MAX_UPDATE_BLOCKS} are allowed")


message_encoder = msgspec.msgpack.Encoder()
_kv_message_decoder = msgspec.msgpack.Decoder(KvMessage)
load_message_decoder = msgspec.msgpack.Decoder(LoadMessage)
kv_query_decoder = msgspec.msgpack.Decoder(KvQuery)
