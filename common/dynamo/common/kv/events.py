"""KV cache events of a worker: which blocks were added and removed, by sequence hash.

A worker keeps a `KvState`: its own full copy, fed by the engine. Once per engine step it takes the net change as one numbered
`KvUpdate`. Numbers count from 0 per instance without gaps, so a reader knows what it missed; `KvSnapshot` is the whole copy
as of one number. Applying the same update twice changes nothing.

Blocks in the memory of the GPU are an update's own; those of slower tiers are in its `tiers`. A block can be on several tiers:
each is told for itself, and a reader counts the block on the fastest.
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
from dynamo.common.kv.tiers import MAX_TIER_CHANGES, SLOW_TIERS, Tier, TierChange

MAX_UPDATE_BLOCKS = 1 << 16
"""More blocks than this are split into several updates, since nats-server closes a connection that sends too long a message."""
_UPDATE_BYTES = 16 * HASH_BYTES
"""About how many bytes a kept update takes beside its hashes."""
_MAX_UPDATE_BYTES = MAX_UPDATE_BLOCKS * HASH_BYTES
# What readers accept, so that no instance can make others compute with infinities or less than nothing.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_LastNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
"""The number of an update; -1: there was none."""
_Sum: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Tiers: TypeAlias = Annotated[tuple[TierChange, ...], msgspec.Meta(max_length=MAX_TIER_CHANGES)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class KvUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One step's net change, to be applied in the order `cleared`, `removed`, `stored`, then `tiers`."""

    number: _Count
    stored: bytes = b""
    """Sequence hashes, see `pack_hashes`; parents before children."""
    removed: bytes = b""
    cleared: bool = False
    """All blocks of all tiers were removed."""
    tiers: _Tiers = ()
    """What changed in tiers slower than the GPU's memory. Processes of the version before do not read it."""

    @property
    def stored_hashes(self) -> list[int]:
        return unpack_hashes(self.stored)

    @property
    def removed_hashes(self) -> list[int]:
        return unpack_hashes(self.removed)

    @property
    def hash_bytes(self) -> int:
        """Bytes of all hashes in it."""
        size = len(self.stored) + len(self.removed)
        if self.tiers:
            size += _tier_bytes(self.tiers)
        return size


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All blocks that an instance caches after its update `number`; -1: before its first one."""

    number: _LastNumber = -1
    blocks: bytes = b""
    """Sequence hashes of the blocks in the GPU's memory."""
    tiers: _Tiers = ()
    """The blocks of slower tiers, as stored ones."""

    @property
    def hashes(self) -> list[int]:
        return unpack_hashes(self.blocks)

    @property
    def hash_bytes(self) -> int:
        """Bytes of all hashes in it."""
        return len(self.blocks) + _tier_bytes(self.tiers)


def _tier_bytes(tiers: Iterable[TierChange]) -> int:
    return sum([len(change.stored) + len(change.removed) for change in tiers])


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
    kv_number: _LastNumber = -1
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

    __slots__ = ("removed", "stored")

    def __init__(self) -> None:
        # Dictionaries as ordered sets: readers get parents before children.
        self.stored: dict[int, None] = {}
        self.removed: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self.stored) or bool(self.removed)

    def store(self, blocks: Iterable[int]) -> None:
        """Add `blocks`, which were absent."""
        _move(blocks, self.removed, self.stored)

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove `blocks`, which were present."""
        _move(blocks, self.stored, self.removed)

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


class _TierBlocks:
    """The blocks of one tier by data-parallel rank, and their net change."""

    __slots__ = ("change", "ranks")

    def __init__(self) -> None:
        self.ranks: dict[int, dict[int, None]] = {}
        """The blocks of each rank: dictionaries as ordered sets."""
        self.change = KvChange()

    def held(self) -> Collection[int]:
        """Return the blocks that are cached, parents before children."""
        if len(self.ranks) == 1:
            return next(iter(self.ranks.values())).keys()
        return dict.fromkeys(chain.from_iterable(self.ranks.values())).keys()

    def of_rank(self, rank: int) -> Collection[int]:
        return self.ranks.get(rank, {}).keys()

    def is_empty_without(self, rank: int) -> bool:
        """Return whether no other rank caches anything here."""
        return not any(held for number, held in self.ranks.items() if number != rank)

    def __contains__(self, block: int) -> bool:
        return any(block in held for held in self.ranks.values())

    def clear(self) -> None:
        """Forget all blocks of all ranks, and what changed: readers are told that everything was cleared."""
        for own in self.ranks.values():
            own.clear()
        self.change = KvChange()

    def published(self) -> Collection[int]:
        """Return the blocks without the net change."""
        change = self.change
        if not change:
            return self.held()
        published = [block for block in self.held() if block not in change.stored]
        published.extend(change.removed)
        return published

    def nowhere_else(self, blocks: Iterable[int], rank: int) -> Iterable[int]:
        """Return the blocks that no other rank caches."""
        others = [held for number, held in self.ranks.items() if number != rank]
        return [block for block in blocks if not any(block in held for held in others)]


class KvState:
    """A worker's own full copy of what its engine caches, and the numbered updates by which others follow it.

    An engine with several data-parallel ranks names the rank of each change: a block is cached while any rank caches it. An
    engine with several tiers names the tier: a block that is copied to a slower one is stored there, and removed from each tier
    for itself. The latest updates are kept for readers that missed some, as many as fit into `log_bytes`.
    """

    def __init__(self, log_bytes: int = 4 << 20) -> None:
        self._gpu = _TierBlocks()
        self._slow: dict[Tier, _TierBlocks] = {}
        """Slower tiers that have ever had a block, fastest first."""
        self._is_cleared = False
        """Whether everything was cleared since the last update."""
        self.unknown = 0
        """Blocks, in all, that the engine announced on media that are unknown: they count for nothing."""
        self._next = 0
        self._log: deque[KvUpdate] = deque()
        self._log_bytes = 0
        self._log_limit_bytes = log_bytes

    def __len__(self) -> int:
        """Return how many blocks are cached in the GPU's memory."""
        return len(self.held())

    def __contains__(self, block: int) -> bool:
        """Return whether a block is in the GPU's memory."""
        return block in self._gpu

    def held(self, tier: Tier = Tier.GPU) -> Collection[int]:
        """Return the blocks that are cached on a tier, parents before children."""
        blocks = self._gpu if tier is Tier.GPU else self._slow.get(tier)
        return () if blocks is None else blocks.held()

    @property
    def number(self) -> int:
        """Number of the last update taken; -1: none."""
        return self._next - 1

    @property
    def changed(self) -> bool:
        """Whether `take_update` would return an update."""
        if self._is_cleared or self._gpu.change:
            return True
        return bool(self._slow) and any(blocks.change for blocks in self._slow.values())

    def store(self, blocks: Iterable[int], rank: int = 0, tier: Tier = Tier.GPU) -> None:
        """Add blocks to a tier, parents before children. Blocks that are present are skipped."""
        held = self._gpu if tier is Tier.GPU else self._slow.get(tier) or self._new_tier(tier)
        own = held.ranks.setdefault(rank, {})
        new = dict.fromkeys([block for block in blocks if block not in own])
        own.update(new)
        held.change.store(new if len(held.ranks) == 1 else held.nowhere_else(new, rank))

    def remove(self, blocks: Iterable[int], rank: int = 0, tier: Tier = Tier.GPU) -> None:
        """Remove blocks from a tier. Blocks that are absent are skipped."""
        held = self._gpu if tier is Tier.GPU else self._slow.get(tier)
        if held is None:
            return
        own = held.ranks.setdefault(rank, {})
        gone = [block for block in blocks if own.pop(block, 0) is None]
        held.change.remove(gone if len(held.ranks) == 1 else held.nowhere_else(gone, rank))

    def clear(self, rank: int = 0, tier: Tier | None = None) -> None:
        """Remove all blocks of a rank from a tier; None: from every tier."""
        every = {Tier.GPU: self._gpu, **self._slow}
        cleared = every if tier is None else {tier: every[tier]} if tier in every else {}
        if not any(blocks.of_rank(rank) for blocks in cleared.values()):
            return
        if all(blocks.is_empty_without(rank) and (name in cleared or not blocks.held()) for name, blocks in every.items()):
            for blocks in every.values():
                blocks.clear()
            self._is_cleared = True
            return
        for name, blocks in cleared.items():
            self.remove(list(blocks.of_rank(rank)), rank, name)

    def count_unknown(self, blocks: int) -> None:
        """Count blocks that the engine announced on a medium that is unknown."""
        self.unknown += blocks

    def _new_tier(self, tier: Tier) -> _TierBlocks:
        self._slow[tier] = blocks = _TierBlocks()
        self._slow = {each: self._slow[each] for each in SLOW_TIERS if each in self._slow}
        return blocks

    def take_update(self) -> KvUpdate | None:
        """Return the numbered net change since the last call, or None. A large change is split, and the rest remains."""
        change = self._gpu.change
        if not (change.stored or change.removed or ((self._slow or self._is_cleared) and self.changed)):
            return None
        removed = change.take_removed(MAX_UPDATE_BLOCKS)
        stored = change.take_stored(MAX_UPDATE_BLOCKS - len(removed))
        tiers = self._take_tiers(MAX_UPDATE_BLOCKS - len(removed) - len(stored)) if self._slow else ()
        update = KvUpdate(self._next, pack_hashes(stored), pack_hashes(removed), self._is_cleared, tiers)
        self._is_cleared = False
        self._next += 1
        self._log.append(update)
        self._log_bytes += update.hash_bytes + _UPDATE_BYTES
        while self._log_bytes > self._log_limit_bytes:
            self._log_bytes -= self._log.popleft().hash_bytes + _UPDATE_BYTES
        return update

    def _take_tiers(self, limit: int) -> tuple[TierChange, ...]:
        """Take at most `limit` blocks out of the changes of slow tiers."""
        tiers: list[TierChange] = []
        for tier, blocks in self._slow.items():
            removed = blocks.change.take_removed(limit)
            stored = blocks.change.take_stored(limit - len(removed))
            if removed or stored:
                tiers.append(TierChange(tier.value, pack_hashes(stored), pack_hashes(removed)))
                limit -= len(removed) + len(stored)
        return tuple(tiers)

    def queue_full_update(self) -> None:
        """Make the next update one that clears everything and stores what is cached, so that readers need no earlier one."""
        self._is_cleared = True
        for blocks in (self._gpu, *self._slow.values()):
            blocks.change = KvChange()
            blocks.change.stored = dict.fromkeys(blocks.held())

    def since(self, number: int) -> Sequence[KvUpdate] | None:
        """Return every update from `number` on, or None if some of them are no longer kept, so that a snapshot is needed."""
        first = self._next - len(self._log)
        if not first <= number <= self._next:
            return None
        return [update for update in self._log if update.number >= number]

    def snapshot(self) -> KvSnapshot:
        """Return all blocks as of `number`. Changes that were not taken as an update are left out."""
        # The blocks before a clear are not known any more. Readers get the state after it now and the update, which changes
        # nothing for them, later.
        read = _TierBlocks.held if self._is_cleared else _TierBlocks.published
        held = ((tier, read(blocks)) for tier, blocks in self._slow.items())
        tiers = tuple([TierChange(tier.value, pack_hashes(blocks)) for tier, blocks in held if blocks])
        return KvSnapshot(self.number, pack_hashes(read(self._gpu)), tiers)


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
    since: _Count = 0


def read_message(payload: bytes | memoryview) -> KvMessage:
    """Decode a KvMessage. Raises ValueError, also for a hash that is cut off and for too many of them."""
    message: KvMessage = _kv_message_decoder.decode(payload)
    stored, removed = len(message.update.stored), len(message.update.removed)
    if (stored | removed) % HASH_BYTES or stored + removed > _MAX_UPDATE_BYTES or message.update.tiers:
        check_update(message.update)
    return message


def encode_message(model: str, update: KvUpdate) -> bytes:
    """Encode a KvMessage. An update without slow tiers takes no byte more than before there were any."""
    if update.tiers:
        return message_encoder.encode(KvMessage(model, update))
    return message_encoder.encode((model, (update.number, update.stored, update.removed, update.cleared)))


def check_update(update: KvUpdate) -> None:
    """Raise ValueError unless an update has whole hashes, and no more of them than one may have."""
    _check_hashes(update.stored, update.removed)
    check_tiers(update.tiers)
    if update.hash_bytes > _MAX_UPDATE_BYTES:
        raise ValueError(f"it has {update.hash_bytes // HASH_BYTES} blocks; at most {MAX_UPDATE_BLOCKS} are allowed")


def check_snapshot(snapshot: KvSnapshot) -> None:
    """Raise ValueError unless a snapshot has whole hashes."""
    _check_hashes(snapshot.blocks)
    check_tiers(snapshot.tiers)


def check_tiers(tiers: Sequence[TierChange]) -> None:
    for change in tiers:
        _check_hashes(change.stored, change.removed)


def _check_hashes(*packed: bytes) -> None:
    if any(len(each) % HASH_BYTES for each in packed):
        raise ValueError("its blocks are not a whole number of hashes")


message_encoder = msgspec.msgpack.Encoder()
_kv_message_decoder = msgspec.msgpack.Decoder(KvMessage)
load_message_decoder = msgspec.msgpack.Decoder(LoadMessage)
kv_query_decoder = msgspec.msgpack.Decoder(KvQuery)
