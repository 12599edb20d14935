"""Which instances hold which prefixes: a flat map from sequence hash to the set of instances.

An equal sequence hash means an equal prefix, so the map needs no tree. It is kept exact by the instances' events. Three things
keep it cheap at tens of millions of entries:

- it is split into shards by hash, so that no single dictionary ever grows for long while a request waits;
- a set of instances is one small integer (`holders.py`);
- removing an instance, or replacing what it holds by a snapshot, only retires its *slot*: matches ignore retired slots, and
  `sweep`, which goes round the shards one at a time, takes them out of the map. A slot is used again after one round, which
  takes 2 s of CPU for 5 million blocks, however many instances left: each block is looked at, and memory is slow.

Blocks of slower tiers are in further maps, one per tier, made when the first such block comes. All maps have the same slots.

Memory per (block, instance) entry: 81 to 107 bytes where every block is held by one instance only, less where they share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.tiers import SLOW_TIERS, Tier, TierChange
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache import holders

_SHARD_BITS = 12
_SHARDS = 1 << _SHARD_BITS
# By the highest bits: a dictionary spreads its keys by the lowest ones.
_SHARD_SHIFT = 64 - _SHARD_BITS
_REMEMBERED_MASKS = 64
_SWEPT_PER_UPDATE = 0.25
_SWEPT_PER_CLEAR = 2.0
"""Shards that are swept for an update: few, since a hundred updates may be handled before the event loop gets to requests, but
enough for an instance that clears its cache with every update."""


class Positions:
    """The positions of routing candidates by their slots."""

    __slots__ = ("_by_slot", "_of_masks")

    def __init__(self, by_slot: Mapping[int, int]) -> None:
        self._by_slot = by_slot
        self._of_masks: dict[int, Sequence[int]] = {}
        """The last masks: prefixes that many prompts share are on the same instances for a while."""

    def of(self, mask: int) -> Sequence[int]:
        """Return the positions of those candidates whose slot is in a bit mask."""
        positions = self._of_masks.get(mask)
        if positions is None:
            if len(self._of_masks) >= _REMEMBERED_MASKS:
                self._of_masks.clear()
            positions = self._of_masks[mask] = list(self._read(mask))
        return positions

    def _read(self, mask: int) -> Iterator[int]:
        bits = f"{mask:b}"[::-1]
        slot = bits.find("1")
        while slot >= 0:
            position = self._by_slot.get(slot)
            if position is not None:
                yield position
            slot = bits.find("1", slot + 1)


class Match(msgspec.Struct, frozen=True):
    """How much of one prompt each instance holds, as groups of instances of equal overlap."""

    groups: Sequence[tuple[int, int]]
    """(overlap in blocks, bit mask of slots) per group, longest overlap first. Instances without overlap are in no group."""

    def by_position(self, positions: Positions) -> dict[int, int]:
        """Return the overlap in blocks by position of the candidate. Without zero overlaps."""
        overlaps: dict[int, int] = {}
        for blocks, mask in self.groups:
            overlaps.update(dict.fromkeys(positions.of(mask), blocks))
        return overlaps


NO_MATCH = Match(())


class SlowMatch(msgspec.Struct, frozen=True):
    """How much of one prompt each instance has on a slower tier, or a faster one."""

    match: Match
    everywhere: int
    """Blocks that instances have that are in no group: those of a shared store."""

    def by_position(self, positions: Positions, count: int) -> dict[int, int]:
        """Return the number of blocks by position of each of `count` candidates. Without zeros."""
        found = self.match.by_position(positions)
        if self.everywhere:
            return dict.fromkeys(range(count), self.everywhere) | found
        return found


class PrefixIndex:
    """The prefixes that the instances of one model hold.

    Not for several threads. `apply`, `store` and `remove` cost about half a microsecond per block.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        """The blocks in the memory of GPUs."""
        self._slow: dict[Tier, list[dict[int, int]]] = {}
        """The same for each slower tier."""
        self.tiers: Sequence[Tier] = ()
        """The slower tiers that instances have, or had, fastest first. Empty in a fleet that caches on GPUs only."""
        self._slots: dict[InstanceId, int] = {}
        self._owners: list[InstanceId | None] = []
        """Instance of each slot; None: retired, or free."""
        self._blocks: list[int] = []
        """Number of blocks of each slot."""
        self._free: list[int] = []
        """A heap: the lowest is used first, so that small sets stay small integers and masks short."""
        self._slow_slots = 0
        """Bit mask of the live slots that have, or had, blocks on slower tiers."""
        self._live = 0
        """Bit mask of the slots in use."""
        self._retired: deque[tuple[int, int]] = deque()
        """Retired slots, and for each the value of `_swept` at which every shard has been swept since."""
        self._retired_bits = 0
        self._retired_singles: set[int] = set()
        """The retired slots as a bit mask, and the sets of exactly one of them."""
        self._swept = 0
        """How many shards have been swept, ever."""
        self._due = 0.0
        """How many shards are to be swept."""
        self.epoch = 0
        """Changes whenever an instance gets another slot."""

    def __len__(self) -> int:
        """Return the number of different blocks in GPU memory, retired ones that are not yet swept included."""
        return sum(map(len, self._shards))

    def __repr__(self) -> str:
        return f"<PrefixIndex blocks={len(self)} instances={len(self._slots)} retired_slots={len(self._retired)}>"

    def slot(self, instance: InstanceId) -> int | None:
        return self._slots.get(instance)

    def rows(self, instances: Sequence[Instance]) -> Positions:
        """Return the positions in `instances` by slot; instances that hold nothing have no slot."""
        slots = self._slots
        return Positions({slots[instance.id]: position for position, instance in enumerate(instances) if instance.id in slots})

    def held_blocks(self, instance: InstanceId) -> int:
        """Return the number of blocks of an instance, on all tiers together."""
        slot = self._slots.get(instance)
        return 0 if slot is None else self._blocks[slot]

    def instances(self) -> list[InstanceId]:
        return list(self._slots)

    # Changes

    def apply(self, instance: InstanceId, update: KvUpdate) -> None:
        """Apply an update. The caller keeps the updates of an instance in order."""
        if update.cleared:
            self._retire(instance)
        if update.removed:
            self.remove(instance, update.removed_hashes)
        if update.stored:
            self.store(instance, update.stored_hashes)
        if update.tiers:
            self._apply_tiers(instance, update.tiers)
        if self._retired and (update.stored or update.removed):  # not when hundreds of instances leave at once
            self._due += _SWEPT_PER_CLEAR if update.cleared else _SWEPT_PER_UPDATE
            self.sweep(int(self._due))
            self._due %= 1

    def replace(self, instance: InstanceId, snapshot: KvSnapshot) -> None:
        """Replace all blocks of an instance by those of a snapshot."""
        self._retire(instance)
        self.store(instance, snapshot.hashes)
        self._apply_tiers(instance, snapshot.tiers)

    def _apply_tiers(self, instance: InstanceId, changes: Iterable[TierChange]) -> None:
        for change in changes:
            tier = change.tier
            if tier is not None:
                self.remove(instance, change.removed_hashes, tier)
                self.store(instance, change.stored_hashes, tier)
                if (slot := self._slots.get(instance)) is not None:
                    self._slow_slots |= 1 << slot

    def _shards_of(self, tier: Tier) -> list[dict[int, int]]:
        if tier is Tier.GPU:
            return self._shards
        if tier not in self._slow:
            self._slow[tier] = [{} for _ in range(_SHARDS)]
            self._slow = {each: self._slow[each] for each in SLOW_TIERS if each in self._slow}
            self.tiers = tuple(self._slow)
        return self._slow[tier]

    def remove_instance(self, instance: InstanceId) -> None:
        """Remove an instance and its blocks, in the same short time however many they are."""
        self._retire(instance)

    def store(self, instance: InstanceId, blocks: Iterable[int], tier: Tier = Tier.GPU) -> None:
        slot = self._slots.get(instance)
        if slot is None:
            slot = self._new_slot(instance)
        only, with_slot = holders.single(slot), holders.with_slot
        shards = self._shards if tier is Tier.GPU else self._shards_of(tier)
        count = self._blocks[slot]
        for block in blocks:
            shard = shards[block >> _SHARD_SHIFT]
            held = shard.get(block)
            if held is None:
                shard[block] = only
                count += 1
            elif held != only:
                shard[block] = both = with_slot(held, slot)
                if both != held:
                    count += 1
        self._blocks[slot] = count

    def remove(self, instance: InstanceId, blocks: Iterable[int], tier: Tier = Tier.GPU) -> None:
        """Remove blocks of an instance. Blocks that it does not hold are ignored."""
        slot = self._slots.get(instance)
        if slot is None:
            return
        only, without_slot = holders.single(slot), holders.without_slot
        shards = self._shards if tier is Tier.GPU else self._shards_of(tier)
        count = self._blocks[slot]
        for block in blocks:
            shard = shards[block >> _SHARD_SHIFT]
            held = shard.get(block)
            if held is None:
                continue
            left = holders.EMPTY if held == only else without_slot(held, slot)
            if left:
                shard[block] = left
                if left == held:
                    continue
            else:
                del shard[block]
            count -= 1
        self._blocks[slot] = count

    def is_kept(self, instance: InstanceId, block: int) -> bool:
        """Return whether an instance has a block on a slower tier than the GPU's memory."""
        slot, position = self._slots.get(instance), block >> _SHARD_SHIFT
        if slot is None:
            return False
        return any(holders.contains(shards[position].get(block, holders.EMPTY), slot) for shards in self._slow.values())

    def sweep(self, shards: int = _SHARDS) -> bool:
        """Remove retired slots from the next few shards, and return whether more is left to do.

        A shard of 2,500 blocks (10 million in all) takes about 0.2 ms.
        """
        stop = self._swept + shards
        while self._retired and self._swept < stop:
            for tier in (self._shards, *self._slow.values()):
                _sweep_shard(tier[self._swept % _SHARDS], self._retired_bits, self._retired_singles)
            self._swept += 1
            while self._retired and self._retired[0][1] == self._swept:
                self._free_slot(self._retired.popleft()[0])
        return bool(self._retired)

    def _new_slot(self, instance: InstanceId) -> int:
        if self._free:
            slot = heappop(self._free)
            self._owners[slot] = instance
            self._blocks[slot] = 0
        else:
            slot = len(self._owners)
            self._owners.append(instance)
            self._blocks.append(0)
        self._slots[instance] = slot
        self._live |= 1 << slot
        self.epoch += 1
        return slot

    def _retire(self, instance: InstanceId) -> None:
        slot = self._slots.pop(instance, None)
        if slot is None:
            return
        self._owners[slot] = None
        self._live &= ~(1 << slot)
        self._slow_slots &= ~(1 << slot)
        self._retired.append((slot, self._swept + _SHARDS))
        self._retired_bits |= 1 << slot
        self._retired_singles.add(holders.single(slot))
        self.epoch += 1

    def _free_slot(self, slot: int) -> None:
        self._retired_bits &= ~(1 << slot)
        self._retired_singles.remove(holders.single(slot))
        heappush(self._free, slot)

    # Matching

    def match(self, blocks: Sequence[int], guess: int = 0) -> Match:
        """Return the overlap of each instance with a prompt, given by its sequence hashes. `guess` is an overlap to try first.

        This looks up far fewer blocks than the prompt has. An instance that holds a block also holds the blocks before it
        (engines free the end of a prefix first). So if two blocks have the same holders, all blocks between have them as well,
        and the ends of the other overlaps are found by binary search.
        """
        if not blocks:
            return NO_MATCH
        shards, mask = self._shards, holders.mask
        block = blocks[0]
        first = mask(shards[block >> _SHARD_SHIFT].get(block, holders.EMPTY)) & self._live
        if not first:
            return NO_MATCH
        last = len(blocks) - 1
        block = blocks[last]
        complete = mask(shards[block >> _SHARD_SHIFT].get(block, holders.EMPTY)) & first
        groups = [(last + 1, complete)] if complete else []
        # Intervals whose two ends have different holders: the current one, and those left to search.
        guess, beyond = guess - 1, guess  # the last block that is held, and the first that is not
        left, left_mask, right, right_mask = 0, first, last, complete
        waiting: list[tuple[int, int, int, int]] = []
        while left_mask != right_mask:
            while right - left > 1:
                middle = guess if left < guess < right else (left + right) >> 1
                block = blocks[middle]
                held = shards[block >> _SHARD_SHIFT].get(block)
                # An instance that holds the right end counts as holding the middle, so that a hole gives the same result
                # whichever blocks the search looks up.
                middle_mask = right_mask if held is None else mask(held) & left_mask | right_mask
                if middle_mask == right_mask:
                    right = middle
                elif middle_mask == left_mask:
                    left = middle
                    if middle == guess:
                        guess, beyond = beyond, 0
                else:
                    waiting.append((left, left_mask, middle, middle_mask))
                    left, left_mask = middle, middle_mask
            groups.append((right, left_mask & ~right_mask))
            if not waiting:
                break
            left, left_mask, right, right_mask = waiting.pop()
        return Match(groups)

    def match_slow(self, blocks: Sequence[int]) -> Sequence[tuple[Tier, SlowMatch]]:
        """Return, for each slower tier, how many leading blocks each instance has on this tier or a faster one.

        Instances that have nothing on slower tiers are left out. A block in a shared store counts for every instance, as long as
        one of those that announced it is there.
        """
        shards, mask, slots = [self._shards], holders.mask, self._slow_slots
        live = self._live
        matches: list[tuple[Tier, SlowMatch]] = []
        for tier, slow in self._slow.items():
            bare = 0
            if tier is Tier.SHARED:
                bare = 1 << len(self._owners)  # stands for all instances that hold nothing themselves
            else:
                shards.append(slow)

            def held(block: int, bare: int = bare, store: list[dict[int, int]] = slow) -> int:
                position = block >> _SHARD_SHIFT
                if bare and mask(store[position].get(block, holders.EMPTY)) & live:
                    return slots | bare
                here = 0
                for each in shards:
                    here |= mask(each[position].get(block, holders.EMPTY))
                return here & slots

            groups = _runs(blocks, held)
            everywhere = max((count for count, held_by in groups if held_by & bare), default=0)
            matches.append((tier, SlowMatch(Match([(count, held_by & ~bare) for count, held_by in groups]), everywhere)))
        return matches

    def overlaps(self, blocks: Sequence[int]) -> dict[InstanceId, int]:
        """Return the overlap in blocks of every instance that holds at least the first block."""
        result: dict[InstanceId, int] = {}
        for overlap, mask in self.match(blocks).groups:
            while mask:
                slot = mask.bit_length() - 1
                mask ^= 1 << slot
                owner = self._owners[slot]
                assert owner is not None, "live slots have owners"
                result[owner] = overlap
        return result

    def held(self, instance: InstanceId, tier: Tier = Tier.GPU) -> set[int]:
        """Return all blocks of an instance on a tier. Reads the whole map: for tests and debugging only."""
        slot = self._slots.get(instance)
        if slot is None:
            return set()
        return {block for shard in self._shards_of(tier) for block, held in shard.items() if holders.contains(held, slot)}


def _sweep_shard(shard: dict[int, int], bits: int, singles: AbstractSet[int]) -> None:
    """Remove the slots of `bits` from a shard; `singles` are the sets of exactly one of these slots."""
    # One pass over the entries, most of which have one live holder.
    last_single = holders.LAST_SINGLE
    affected = [(block, held) for block, held in shard.items() if (held in singles if 0 < held <= last_single else True)]
    for block, held in affected:
        if 0 < held <= last_single:
            del shard[block]
        elif (present := holders.mask(held)) & bits:
            left = holders.from_mask(present & ~bits)
            if left:
                shard[block] = left
            else:
                del shard[block]


def _runs(blocks: Sequence[int], held: Callable[[int], int]) -> list[tuple[int, int]]:
    """Return (leading blocks, mask of the slots that hold as many), as `PrefixIndex.match` does, but not longest first.

    `held` returns the slots that hold a block, as a mask.
    """
    first = held(blocks[0]) if blocks else 0
    if not first:
        return []
    last = len(blocks) - 1
    complete = held(blocks[last]) & first
    groups = [(last + 1, complete)] if complete else []
    spans = [(0, first, last, complete)]
    while spans:
        left, left_mask, right, right_mask = spans.pop()
        if left_mask == right_mask:
            continue
        if right - left == 1:
            groups.append((right, left_mask & ~right_mask))
            continue
        middle = (left + right) >> 1
        middle_mask = held(blocks[middle]) & left_mask | right_mask
        spans += [(left, left_mask, middle, middle_mask), (middle, middle_mask, right, right_mask)]
    return groups
