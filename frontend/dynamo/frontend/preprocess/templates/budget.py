"""What one rendering of a chat template may cost, in steps and in bytes.

Jinja's sandbox keeps a template from reaching out; it does not keep it from building a text of gigabytes (`s ~ s` in a loop, a
long `replace`, an `indent` of a million spaces) or from running for hours (macros that call themselves twice). So every operation
of a template passes through a `Budget`, which knows before the operation how large its result can be.

Containers can share their parts: 40 times `x = [x, x]` takes a few kilobytes, but its text has 2^40 characters. `Budget.size_of`
counts what a container would be if it were written out, each container once.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import chain
from typing import Final, NamedTuple

NODE_BYTES: Final = 16
"""What an element counts besides its text."""
_READ_FACTOR: Final = 64
_MADE_FACTOR: Final = 16
_BYTES_PER_STEP: Final = 512
"""Both take about a microsecond, if the bytes take long."""
_MAX_DEPTH: Final = 200
MAX_KEYS: Final = 256
"""Keys of a dict that are not text, at most."""
_MAX_ALIKE: Final = 8
"""So many of them may have the same hash."""
_SCALARS = (bool, int, float, type(None))


class BoundExceeded(Exception):
    """The template exceeded one of its bounds, which the message names."""


class OutOfTime(BoundExceeded):
    """The template took more steps, or read more bytes, than this rendering allows."""


class Size(NamedTuple):
    """What a value would be, written out as text."""

    bytes: int
    nodes: int = 1
    depth: int = 0


class Budget:
    """The steps and bytes that are left to one rendering."""

    def __init__(self, *, steps: int, max_bytes: int) -> None:
        """`max_bytes` is for each value that the template makes; all of them together may be some times as long."""
        self._steps = steps
        self._readable = min(_READ_FACTOR * max_bytes, _BYTES_PER_STEP * steps)
        self._makeable = _MADE_FACTOR * max_bytes
        self.max_bytes = max_bytes
        self._sizes: dict[int, tuple[object, Size]] = {}
        """By identity, with the container itself: as long as it is here, no other object has that identity."""

    def __repr__(self) -> str:
        return f"Budget({self._steps} steps left, {self._readable} bytes to read, {self._makeable} to make)"

    def step(self, count: int = 1) -> None:
        """Count operations. Raises BoundExceeded."""
        self._steps -= count
        if self._steps < 0:
            raise OutOfTime("its loops and calls do not come to an end")

    def charge(self, count: int) -> None:
        """Count bytes that an operation reads. Raises BoundExceeded."""
        self._readable -= count
        if self._readable < 0:
            raise OutOfTime("its operations take too long")

    def check(self, count: int) -> None:
        """Raise BoundExceeded if a result of `count` bytes is too long. To be called before the result is made."""
        if count > self.max_bytes:
            raise BoundExceeded(f"it puts together more than {self.max_bytes} characters")

    def read(self, value: object) -> int:
        """Count an operation's argument, and return its size in bytes. Raises BoundExceeded."""
        size = self.bytes_of(value)
        self._readable -= size
        if self._readable < 0:
            raise OutOfTime("its operations take too long")
        return size

    def made(self, value: object) -> None:
        """Count an operation's result. Raises BoundExceeded."""
        self.made_of(self.bytes_of(value))

    def made_of(self, size: int) -> None:
        """Count what an operation makes, in bytes. Raises BoundExceeded."""
        self.check(size)
        self.charge(size)
        self._makeable -= size
        if self._makeable < 0:
            raise BoundExceeded("its values take too much memory")

    def each(self, items: Iterable[object]) -> Iterator[object]:
        """Iterate over `items`, one step each. Raises BoundExceeded."""
        for item in items:
            self.step()
            yield item

    def check_keys(self, keys: Iterable[object]) -> None:
        """Raise BoundExceeded if what are to be keys of a dict, or members of a set, might be compared one by one.

        Hashes of text are random. Those of numbers and tuples are not, and many of these can be chosen to collide.
        """
        by_hash: dict[int, list[object]] = {}
        count = 0
        for key in keys:
            if isinstance(key, str | bytes):
                continue
            self.read(key)
            alike = by_hash.setdefault(hash(key), [])
            if key in alike:
                continue
            alike.append(key)
            count += 1
            if count > MAX_KEYS or len(alike) > _MAX_ALIKE:
                raise BoundExceeded("it makes a dict, or looks for duplicates, with too many keys that are not text")

    def bytes_of(self, value: object) -> int:
        """Return how long `value` would be as text. Raises BoundExceeded."""
        if isinstance(value, str):
            return NODE_BYTES + len(value)
        if value is None or isinstance(value, bool):
            return NODE_BYTES
        return self._size(value, 0).bytes

    def size_of(self, value: object) -> Size:
        """Return what `value` would be as text. Each container is counted once. Raises BoundExceeded."""
        return self._size(value, 0)

    def _size(self, value: object, level: int) -> Size:
        if isinstance(value, str | bytes):
            return Size(NODE_BYTES + len(value))
        if isinstance(value, _SCALARS):
            return Size(NODE_BYTES + (value.bit_length() // 3 if isinstance(value, int) else 0))
        parts: Iterable[object]
        if isinstance(value, Mapping):
            parts = chain(value.keys(), value.values())
        elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            parts = value
        else:
            return Size(NODE_BYTES)  # what remains is written as its type: loops, macros, iterators
        if (cached := self._sizes.get(id(value))) is not None:
            return cached[1]
        if level > _MAX_DEPTH:
            raise BoundExceeded(f"it nests more than {_MAX_DEPTH} containers")
        total, nodes, depth = NODE_BYTES, 1, 0
        for part in parts:
            size = self._size(part, level + 1)
            total += size.bytes
            nodes += size.nodes
            depth = max(depth, size.depth)
        self.charge(NODE_BYTES * (1 + len(value)))
        result = Size(total, nodes, depth + 1)
        self._sizes[id(value)] = (value, result)
        return result
