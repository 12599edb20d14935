"""Messages of gRPC in the DATA of one call: a flag, four bytes of length, and the message, in whatever pieces they arrive.

`MessageReader` asks its owner for memory when it knows the size of a message, before it stores a byte of it. The system backs
that memory as it is written to, and the owner counts it so: what a prefix announces holds nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import Final, Protocol

import numpy as np

from dynamo.common.errors import PayloadTooLarge
from dynamo.common.process.work import Work
from dynamo.common.tensors.tensors import Buffer

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size
STEP_BYTES: Final = 1 << 20
"""Compressed and decompressed in one turn of the event loop: some milliseconds."""

_INFLATED_BYTES: Final = 64 * 1024
"""Decompressed in one step: blocks that hold nothing take up to a hundred times as long as others."""

GZIP: Final = "gzip"
DEFLATE: Final = "deflate"
_WINDOW_BITS: Final = {GZIP: 31, DEFLATE: 15}
"""zlib's numbers for the two formats, both with a header and a checksum."""


class CorruptMessage(Exception):
    """A compressed message cannot be decompressed. `str()` says why."""


class MessageMemory(Protocol):
    """Memory for one message."""

    @property
    def view(self) -> memoryview:
        """The memory, to be written to."""
        ...

    def finish(self) -> Buffer:
        """Return the message, which has come."""
        ...

    def drop(self) -> None:
        """The rest of the message does not come."""
        ...


class PlainMemory:
    """Memory of this process, neither zeroed nor touched before it is written to."""

    __slots__ = ("view",)

    def __init__(self, size: int) -> None:
        self.view = np.empty(size, np.uint8).data

    def finish(self) -> memoryview:
        return self.view

    def drop(self) -> None:
        pass


class MessageOwner(Protocol):
    """The call whose messages a reader finds."""

    def admit_message(self, size: int, *, is_complete: bool) -> bool:
        """Return whether a message of `size` bytes may come. If not, it and all after it are discarded.

        `is_complete`: it has come.
        """
        ...

    def admit_part(self, received: int, size: int) -> int:
        """Return how many bytes of a message may have come before the next call; `received` of `size` have.

        0 if it may not go on: it and all after it are discarded.
        """
        ...

    def message_memory(self, size: int) -> MessageMemory:
        """Return memory for an admitted message that has not come completely."""
        ...

    def message_received(self, message: Buffer, *, is_compressed: bool) -> None:
        """Take a message: it was written to `message_memory`, or is bytes if it has arrived in one piece."""
        ...

    def refuse_flag(self, flag: int) -> None:
        """Refuse a message with an unknown flag. It and all after it are discarded."""
        ...


class MessageReader:
    """Cuts the DATA of one call into messages. It is a `DataSink`."""

    __slots__ = ("_admitted", "_flag", "_is_refused", "_memory", "_owner", "_prefix", "_view", "received", "size", "total")

    def __init__(self, owner: MessageOwner) -> None:
        self._owner: MessageOwner | None = owner
        """None once nothing is wanted any more: the two hold each other."""
        self._prefix = b""
        """What has arrived of a split prefix."""
        self._memory: MessageMemory | None = None
        """Memory of the message that is arriving."""
        self._view: memoryview | None = None
        """The same, as it is written to."""
        self._admitted = 0
        """Bytes of it that may come before the owner is asked again."""
        self._flag = 0
        self._is_refused = False
        self.size = 0
        """Size of the message that is arriving, of which `received` bytes are here."""
        self.received = 0
        self.total = 0
        """Received of all messages that did not arrive in one piece."""

    @property
    def is_between_messages(self) -> bool:
        return self._memory is None and not self._prefix

    @property
    def missing(self) -> int:
        """The bytes that are still to come of a message whose size is known."""
        return self.size - self.received if self._memory is not None else 0

    def feed(self, data: memoryview) -> None:
        position, end = 0, len(data)
        while position < end and not self._is_refused:
            if self._view is not None:
                count = min(self.size - self.received, end - position)
                self._view[self.received : self.received + count] = data[position : position + count]
                position += count
                self.filled(count)
            elif self._prefix or end - position < PREFIX_BYTES:
                count = min(PREFIX_BYTES - len(self._prefix), end - position)
                self._prefix += bytes(data[position : position + count])
                position += count
                if len(self._prefix) == PREFIX_BYTES:
                    flag, size = PREFIX.unpack(self._prefix)
                    self._prefix = b""
                    position = self._begin(flag, size, data, position)
            else:
                flag, size = PREFIX.unpack_from(data, position)
                position = self._begin(flag, size, data, position + PREFIX_BYTES)

    def _begin(self, flag: int, size: int, data: memoryview, position: int) -> int:
        """Begin a message whose content begins at `position`; return where what is not read yet begins."""
        owner, stop = self._owner, position + size
        is_complete = stop <= len(data)
        assert owner is not None, "a reader without an owner discards all"
        if flag > 1:
            self._is_refused = True
            owner.refuse_flag(flag)
        elif not owner.admit_message(size, is_complete=is_complete):
            self._is_refused = True
        elif is_complete:
            owner.message_received(bytes(data[position:stop]), is_compressed=flag == 1)
            return stop
        else:
            self._flag, self.size, self.received, self._admitted = flag, size, 0, 0
            self._memory = owner.message_memory(size)
            self._view = self._memory.view
        return position

    def space(self) -> memoryview | None:
        return None if self._view is None else self._view[self.received :]

    def filled(self, count: int) -> None:
        self.received += count
        self.total += count
        if self.received > self._admitted and not self._admit():
            return
        if self.received < self.size:
            return
        memory = self._memory
        assert memory is not None and self._owner is not None, "a message that arrives has memory and an owner"
        self._memory = self._view = None
        self._owner.message_received(memory.finish(), is_compressed=self._flag == 1)

    def _admit(self) -> bool:
        if self._owner is None:
            return False  # it was dropped while the system wrote to its memory
        self._admitted = self._owner.admit_part(self.received, self.size)
        if self._admitted:
            return True
        self._is_refused = True
        if self._memory is not None:
            self._memory.drop()
        self._memory = self._view = None
        return False

    def drop(self) -> None:
        """Forget the message that is arriving, and refuse all that comes."""
        self._is_refused = True
        if self._memory is not None:
            self._memory.drop()
        self._memory = self._view = self._owner = None


class EarlyBytes:
    """A sink for what arrives before the handler has accepted the caller."""

    __slots__ = ("kept", "target")

    def __init__(self) -> None:
        self.kept = bytearray()
        self.target: MessageReader | None = None

    def feed(self, data: memoryview) -> None:
        if self.target is None:
            self.kept += data
        else:
            self.target.feed(data)

    def space(self) -> None:
        return None

    def filled(self, count: int) -> None:
        raise AssertionError("it has no memory to be filled")


def inflate_steps(message: Buffer, encoding: str) -> Iterator[bytes]:
    """Decompress a message in pieces of at most `STEP_BYTES`, which may be empty. Raises CorruptMessage."""
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    view = memoryview(message)
    try:
        for begin in range(0, len(view), _INFLATED_BYTES):
            rest: Buffer = view[begin : begin + _INFLATED_BYTES]
            while len(rest) and not inflater.eof:
                yield inflater.decompress(rest, STEP_BYTES)
                rest = inflater.unconsumed_tail
        while not inflater.eof and (piece := inflater.decompress(b"", STEP_BYTES)):
            yield piece
    except zlib.error as error:
        raise CorruptMessage(str(error)) from None
    if not inflater.eof:
        raise CorruptMessage("it is incomplete")
    if inflater.unused_data:
        raise CorruptMessage("there are bytes after its end")


def inflated(message: Buffer, encoding: str, limit: int) -> Work[Buffer]:
    """Decompress a message of at most `limit` bytes then. Raises CorruptMessage, PayloadTooLarge."""
    pieces: list[bytes] = []
    size = 0
    for piece in inflate_steps(message, encoding):
        size += len(piece)
        pieces.append(piece)
        yield len(piece)
        if size > limit:
            raise PayloadTooLarge(f"the decompressed message has over {limit} bytes, which is the limit")
    if len(pieces) == 1:
        return pieces[0]
    joined, position = np.empty(size, np.uint8).data, 0
    pieces.reverse()
    while pieces:  # they are dropped on the way, as the system backs what they are copied to
        piece = pieces.pop()
        joined[position : position + len(piece)] = piece
        position += len(piece)
        yield 0
    return joined


def deflate_steps(message: Buffer, encoding: str) -> Iterator[bytes]:
    """Compress a message. Each piece is what became of the next `STEP_BYTES`, and may be empty."""
    deflater = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    view = memoryview(message)
    for begin in range(0, len(view), STEP_BYTES):
        yield deflater.compress(view[begin : begin + STEP_BYTES])
    yield deflater.flush()
