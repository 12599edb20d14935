"""Sets of instances, as one Python integer each: made for tens of millions of them.

An instance has a *slot*, a small number. A set is one of

    0 or positive   up to five slots below 4,095, sorted, 12 bits each (slot + 1): 28 to 32 bytes of memory
    negative        the bit mask of the slots, negated: any set that does not fit the form above

A plain mask would be simpler but costs 160 bytes at a thousand instances, for every block; most blocks are held by one or few.
Equal sets are equal integers.
"""

from __future__ import annotations

_BITS = 12
_FIELD = (1 << _BITS) - 1
_MAX_SMALL = 5
_LAST_SMALL = 1 << _BITS * (_MAX_SMALL - 1)
"""Sets from here on have five slots: the next one does not fit."""

EMPTY = 0
LAST_SINGLE = _FIELD
"""Positive sets up to here have one slot."""


def single(slot: int) -> int:
    """The set of one slot."""
    return slot + 1 if slot < _FIELD else -(1 << slot)


def mask(holders: int) -> int:
    """The set as a bit mask, bit n for slot n."""
    if holders < 0:
        return -holders
    result = 0
    while holders:
        result |= 1 << (holders & _FIELD) - 1
        holders >>= _BITS
    return result


def contains(holders: int, slot: int) -> bool:
    if holders < 0:
        return bool(-holders >> slot & 1)
    field = slot + 1
    while holders:
        if holders & _FIELD == field:
            return True
        holders >>= _BITS
    return False


def with_slot(holders: int, slot: int) -> int:
    """The set with `slot` in it, whether or not it was before."""
    if holders < 0:
        return -(-holders | 1 << slot)
    field = slot + 1
    low, rest = 0, holders
    shift = 0
    while rest:
        current = rest & _FIELD
        if current == field:
            return holders
        if current > field:
            break
        low |= current << shift
        shift += _BITS
        rest >>= _BITS
    if holders >= _LAST_SMALL or field > _FIELD:
        return -(mask(holders) | 1 << slot)
    return low | field << shift | rest << shift + _BITS


def without_slot(holders: int, slot: int) -> int:
    """The set without `slot`, whether or not it was there before."""
    if holders < 0:
        return from_mask(-holders & ~(1 << slot))
    field = slot + 1
    low, rest = 0, holders
    shift = 0
    while rest:
        current = rest & _FIELD
        rest >>= _BITS
        if current == field:
            return low | rest << shift
        low |= current << shift
        shift += _BITS
    return holders


def from_mask(bits: int) -> int:
    """The set whose bit mask is given."""
    if bits.bit_count() > _MAX_SMALL or bits >> _FIELD:
        return -bits
    result = shift = 0
    while bits:
        slot = (bits & -bits).bit_length() - 1
        result |= slot + 1 << shift
        shift += _BITS
        bits &= bits - 1
    return result
