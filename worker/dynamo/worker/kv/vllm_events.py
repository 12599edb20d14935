"""vLLM's KV events, read as they come, and translated into sequence hashes.

vLLM (and SGLang, which copied the format) publishes msgpack batches `[timestamp, events, data parallel rank]`. An event was an
array led by its type's name until 2026-06 and is a map with a `type` key since; the batch may become a map too. New keys and
types appear every few months. So decoding is by name or position and skips unknown parts.

The engine's block hashes are opaque (its seed and algorithm are its own): they serve as handles that removals refer to. What
travels on are our own sequence hashes over the token ids in the events. Events of slower tiers that come without token ids name
blocks by handles that an earlier event explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dynamo.common.errors import EngineError
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.hashes import block_hash, chain, space_hash
from dynamo.common.kv.tiers import Tier

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality")
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")

_TIERS = {
    **dict.fromkeys(("", "gpu", "device", "hbm"), Tier.GPU),
    **dict.fromkeys(("cpu", "cpu_pinned", "cpu_tier1"), Tier.CPU),
    **dict.fromkeys(("cpu_tier2", "disk", "nvme"), Tier.DISK),
}
"""The tier of each medium, in lower case: vLLM's names, and SGLang's `CPU_PINNED`, `CPU_TIER1` and `CPU_TIER2`."""
_STORES = frozenset({"storage", "fs", "obj"})
"""Media of vLLM's file and object stores. Where these are, their `locality` says. They announce no removals."""
_STORE_TIERS = {"local": Tier.DISK, "remote": Tier.SHARED}
_FULL_ATTENTION_KINDS = frozenset({"", "full_attention", "mla_attention"})

_U64 = 2**64 - 1
_MAX_BLOCK_TOKENS = 1 << 16
"""An event with larger blocks is malformed."""
MAX_BLOCKS = 1 << 21
"""Blocks of one rank that are tracked on a tier: a pool of 32 million tokens in blocks of 16, and about 1 GiB of memory here."""
_STEP_BLOCKS, _STEP_TOKENS = 512, 8192
"""What a part of an event has at most: about 3 ms of work."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    hashes: Sequence[int]
    """The engine's block hashes, folded to 64 bits."""
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    medium: str = ""
    adapter: str = ""
    extra_keys: Sequence[Sequence[Any]] = ()
    """Per block, the keys other than tokens that entered the engine's hash. Empty, or one entry per block."""
    group: int | None = None
    attention: str = ""
    locality: str = ""
    """Where a store is: LOCAL or REMOTE."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: Sequence[int]
    medium: str = ""
    group: int | None = None
    locality: str = ""


@dataclass(frozen=True, slots=True)
class AllCleared:
    pass


AdapterName = Callable[[str], str]

VllmEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class VllmBatch:
    events: Sequence[VllmEvent]
    rank: int = 0
    """Data-parallel rank of the engine that made the events."""
    skipped: int = 0
    """Events of unknown type, or malformed."""


def decode_batch(payload: bytes | memoryview) -> VllmBatch:
    """Decode one published batch. Raises EngineError if it is malformed; single malformed events are skipped and counted."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError) as error:  # DecodeError is a ValueError, and so is text that is no UTF-8
        raise EngineError(f"a KV event batch of the engine is not msgpack: {error}") from error
    fields = raw if isinstance(raw, dict) else _named(raw, _BATCH_FIELDS) if isinstance(raw, list) else {}
    items = fields.get("events")
    if not isinstance(items, list):
        raise EngineError("a KV event batch of the engine holds no list of events")
    events: list[VllmEvent] = []
    skipped = 0
    for item in items:
        try:
            event = _event(item)
        except (TypeError, ValueError):
            event = None
        if event is None:
            skipped += 1
        else:
            events.append(event)
    rank = fields.get("data_parallel_rank")
    return VllmBatch(events, rank if isinstance(rank, int) else 0, skipped)


def fold_hash(value: object) -> int:
    """Return an engine's block hash as 64 bits: integers of either sign modulo 2^64, bytes by their last eight, big-endian.

    Raises TypeError for anything else. A folded digest equals the integer that vLLM publishes when configured to use integers.
    """
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _U64
    raise TypeError(f"a block hash is an integer or bytes, not {type(value).__name__}")


def _named(values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return positional values by name. Trailing ones may be absent; surplus ones are ignored."""
    return dict(zip(names, values, strict=False))


def _event(raw: object) -> VllmEvent | None:
    """Decode one event in either form; return None for an unknown type. Raises TypeError or ValueError if it is malformed."""
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        fields = _named(raw[1:], _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS)
    else:
        raise TypeError("an event is a map or a list that is not empty")
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            hashes = _hashes(fields.get("block_hashes"))
            group = _optional_int(fields.get("group_idx"))
            return BlocksRemoved(hashes, _text(fields.get("medium")), group, _text(fields.get("locality")))
        case "AllBlocksCleared":
            return AllCleared()
        case _:
            return None


def _stored(fields: Mapping[Any, Any]) -> BlocksStored:
    hashes = _hashes(fields.get("block_hashes"))
    parent = fields.get("parent_block_hash")
    token_ids = fields.get("token_ids") or ()
    block_size = fields.get("block_size")
    if not isinstance(block_size, int) or not 0 <= block_size <= _MAX_BLOCK_TOKENS or (token_ids and not block_size):
        raise ValueError("a stored event with token ids has no block size, or an absurd one")
    if not isinstance(token_ids, list | tuple) or not all(isinstance(token, int) for token in token_ids):
        raise TypeError("token ids are a list of integers")
    extra_keys = fields.get("extra_keys") or ()
    if not isinstance(extra_keys, list | tuple):
        raise TypeError("extra keys are a list")
    adapter = _text(fields.get("lora_name"))
    lora_id = fields.get("lora_id")
    if not adapter and isinstance(lora_id, int) and lora_id > 0:
        # Old engines name only a number; an adapter's blocks must not look like the base model's.
        adapter = f"lora:{lora_id}"
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else fold_hash(parent),
        token_ids=token_ids,
        block_size=block_size,
        medium=_text(fields.get("medium")),
        adapter=adapter,
        extra_keys=tuple(_keys(keys) for keys in extra_keys),
        group=_optional_int(fields.get("group_idx")),
        attention=_text(fields.get("kv_cache_spec_kind")),
        locality=_text(fields.get("locality")),
    )


def parts(event: VllmEvent) -> Iterator[VllmEvent]:
    """Yield events that mean the same, none of which takes long to translate."""
    if isinstance(event, AllCleared):
        yield event
        return
    count, size = len(event.hashes), event.block_size if isinstance(event, BlocksStored) else 0
    step = max(1, min(_STEP_BLOCKS, _STEP_TOKENS // size if size else _STEP_BLOCKS))
    is_short = isinstance(event, BlocksStored) and 0 < len(event.token_ids) < count * size  # none of its blocks counts
    if count <= step or is_short:
        yield event
        return
    for begin in range(0, count, step):
        end = begin + step
        if isinstance(event, BlocksRemoved):
            yield replace(event, hashes=event.hashes[begin:end])
            continue
        yield replace(
            event,
            hashes=event.hashes[begin:end],
            parent=event.hashes[begin - 1] if begin else event.parent,
            token_ids=event.token_ids[begin * size : end * size],
            extra_keys=event.extra_keys[begin:end],
        )


def tier_of(medium: str, locality: str = "") -> Tier | None:
    """Return the tier that an engine's medium belongs to; None: it is unknown."""
    name = medium.lower()
    return _STORE_TIERS.get(locality.lower()) if name in _STORES else _TIERS.get(name)


def _hashes(raw: object) -> list[int]:
    if not isinstance(raw, list | tuple):
        raise TypeError("block hashes are a list")
    return [fold_hash(value) for value in raw]


def _keys(raw: object) -> Sequence[Any]:
    if raw is None:
        return ()
    return raw if isinstance(raw, list | tuple) else (raw,)


def _text(raw: object) -> str:
    return raw if isinstance(raw, str) else ""


def _optional_int(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


@dataclass(slots=True)
class Translated:
    """The changes that one event makes in one tier, in sequence hashes."""

    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    cleared: bool = False
    """All blocks of all tiers were removed."""
    tier: Tier = Tier.GPU


@dataclass(slots=True)
class _Block:
    sequence_hashes: list[int]
    """One hash, or several for a block of a slow tier that has the tokens of several blocks."""
    copies: int = 1


class Translator:
    """Engine hashes to sequence hashes, for one engine rank.

    vLLM announces a block once per physical copy, and removes it once per copy: a block is cached on a tier until its last copy
    there goes. A hybrid model announces every block once per attention group: one group, of full attention, counts for all,
    because only there a cached block means that the whole prefix before it is cached, too.
    """

    def __init__(self, adapter_name: AdapterName = str, max_stored: int = 1 << 20, max_blocks: int = MAX_BLOCKS) -> None:
        """`adapter_name` returns our name of an adapter from the engine's. `max_stored`: the blocks of stores without removals
        that are tracked; beyond, the oldest are taken to be gone. `max_blocks`: those in the GPU's memory; beyond, new ones are
        left out."""
        self._adapter_name = adapter_name
        self._tiers: dict[Tier, dict[int, _Block]] = {Tier.GPU: {}}
        """By tier, the engine's blocks by handle."""
        self._max_stored = max_stored
        self._max_blocks = max_blocks
        self._block_size = 0
        """Tokens of a block in the GPU's memory; 0: not known yet."""
        self._has_keys = False
        """Whether blocks in the GPU's memory had keys other than tokens, such as salts and images."""
        self._group: int | None = None
        self.unknown = 0
        """Blocks left out because their medium is unknown."""

    def __len__(self) -> int:
        """Return how many of the engine's blocks are tracked, on all tiers."""
        return sum(map(len, self._tiers.values()))

    def translate(self, event: VllmEvent) -> Translated:
        if isinstance(event, AllCleared):
            self._tiers = {Tier.GPU: {}}
            return Translated(cleared=True)
        tier = tier_of(event.medium, event.locality)
        if tier is None:
            self.unknown += len(event.hashes)
            return Translated()
        match event:
            case BlocksStored():
                return self._store(event, tier)
            case BlocksRemoved():
                return Translated(removed=self._remove(event, tier), tier=tier)

    def _store(self, event: BlocksStored, tier: Tier) -> Translated:
        result = Translated(tier=tier)
        count = len(event.hashes)
        if not self._counts(event.group, event.attention):
            return result
        if tier is Tier.GPU and event.block_size:
            self._block_size = event.block_size
            self._has_keys = self._has_keys or any(event.extra_keys)
        if tier is not Tier.GPU and not event.token_ids:
            hashes = self._announced(event)
        elif not event.block_size or len(event.token_ids) < count * event.block_size:
            hashes = []
        elif tier is not Tier.GPU and not event.extra_keys and event.block_size == self._block_size:
            hashes = self._without_keys(event, tier)
        else:
            hashes = self._sequence_hashes(event, tier)
        blocks = self._tiers.setdefault(tier, {})
        for handle, values in zip(event.hashes, hashes, strict=False):
            if values is None:
                continue
            cached = blocks.get(handle)
            if cached is None and tier is Tier.GPU and len(blocks) >= self._max_blocks:
                break  # those after it need it
            if cached is not None and cached.sequence_hashes == values:
                cached.copies += 1
                if tier is not Tier.GPU:  # the last to be taken for gone
                    blocks[handle] = blocks.pop(handle)
                continue
            if cached is not None:  # the engine gave the handle to another block, and its removal was lost
                result.removed += cached.sequence_hashes
            blocks[handle] = _Block(values)
            result.stored += values
        while len(blocks) > self._max_stored and tier is not Tier.GPU:
            result.removed += blocks.pop(next(iter(blocks))).sequence_hashes
        return result

    def _without_keys(self, event: BlocksStored, tier: Tier) -> list[list[int] | None]:
        """Return the sequence hashes of blocks whose event may have left out keys other than tokens, as those of vLLM 0.32's
        OffloadingConnector do: a salted block must not look like one without salt.

        They also come in any order, children before parents. A handle that is known answers both.
        """
        hashes = [self._known(handle) for handle in event.hashes]
        if None in hashes and not self._has_keys:
            return self._sequence_hashes(event, tier)
        return hashes

    def _announced(self, event: BlocksStored) -> list[list[int] | None]:
        """Return the sequence hashes of blocks that come without tokens: those of an earlier event, on whichever tier."""
        if event.block_size not in (0, self._block_size):  # the handle of several blocks is that of the last of them
            return []
        return [self._known(handle) for handle in event.hashes]

    def _known(self, handle: int) -> list[int] | None:
        for blocks in self._tiers.values():
            if handle in blocks:
                return blocks[handle].sequence_hashes
        return None

    def _sequence_hashes(self, event: BlocksStored, tier: Tier) -> list[list[int] | None]:
        """Return the sequence hashes of blocks that come with their tokens, up to the first that has none."""
        size, count = event.block_size, len(event.hashes)
        part = self._block_size if tier is not Tier.GPU and self._block_size else size
        if size % part or (size != part and any(event.extra_keys)):
            return []
        parent = None
        if event.parent is not None:
            known = self._known(event.parent)
            if known is None:
                return []
            parent = known[-1]
        result: list[list[int] | None] = []
        for position in range(count):
            keys = event.extra_keys[position] if position < len(event.extra_keys) else ()
            keys = [key for key in keys if key != event.adapter]
            if parent is None:
                # The salt is the last extra key of a first block.
                salt = keys.pop() if keys and isinstance(keys[-1], str) else ""
                parent = space_hash(self._adapter_name(event.adapter), salt)
            values: list[int] = []
            for begin in range(position * size, (position + 1) * size, part):
                try:
                    block = block_hash(_block_bytes(event.token_ids[begin : begin + part], keys))
                except OverflowError:
                    return result
                parent = chain(parent, block)
                values.append(parent)
            result.append(values)
        return result

    def _remove(self, event: BlocksRemoved, tier: Tier) -> list[int]:
        removed: list[int] = []
        blocks = self._tiers.get(tier)
        if blocks is None or not self._counts(event.group, ""):
            return removed
        for handle in event.hashes:
            cached = blocks.get(handle)
            if cached is None:
                continue
            cached.copies -= 1
            if not cached.copies:
                del blocks[handle]
                removed += cached.sequence_hashes
        return removed

    def _counts(self, group: int | None, attention: str) -> bool:
        if attention not in _FULL_ATTENTION_KINDS:
            return False
        if group is None:
            return True
        if self._group is None and attention:
            self._group = group
        return group == (self._group or 0)


def _block_bytes(token_ids: Sequence[int], keys: Iterable[Any]) -> bytes:
    """Return the bytes that are hashed for a block. Raises OverflowError for a token id that does not fit into 32 bits.

    Extra keys, such as those of images, are included so that blocks of equal placeholder tokens differ.
    """
    tokens = pack_tokens(token_ids)
    extra = list(keys)
    return tokens + msgspec.msgpack.encode(extra) if extra else tokens
