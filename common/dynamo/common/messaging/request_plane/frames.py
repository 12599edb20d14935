"""What travels on the request plane.

A NATS message is one msgpack array of frames that one process had for one peer within one event-loop turn. A frame is a
msgpack array whose first element is its kind. The body, where there is one, comes last, so that a large body need not be copied
into the message: it is written to the socket from where it lies (`Body`).

| frame | direction | meaning |
|---|---|---|
| OPEN | to the instance | a request: its verb, headers, what is left of its deadline, body size, first bytes of the body |
| NEAR | to the instance | OPEN on one host: the body may lie in the caller's arena, the response in the instance's |
| LENT | to the caller | a CHUNK that lies in the instance's arena |
| FAR | to the caller | the body of this request cannot be read where it lies: send it in messages |
| CHUNK | both | the next part of a body; a response's parts precede their DATA or END. If empty: all before it has been sent |
| CREDIT | both | so many bytes of this stream, counted from its beginning, may be sent; a later one makes up for a lost one |
| CANCEL | to the instance | the caller is gone or too late: stop within one step |
| DATA | to the caller | one response |
| MANY | to the caller | DATA frames of one stream that follow one another, if its request has the header `many` |
| END | to the caller | the last frame of a request that succeeded: the trailer, or a unary response |
| ERROR | to the caller | the last frame of a request that failed |
| BEAT | to the caller | these silent streams are still being worked on, and these wait for credit, and for how much |
| PROBE | to the instance | are you there, and do you know these streams? An empty one also says that the caller is there |
| KNOWN | to the caller | the response to PROBE: which of them are open and which are not |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.messaging.buffers import Body, Buffer

INLINE_BYTES = 4096
"""Up to here copying a body into its frame is cheaper than writing it apart."""
ALL_STREAMS = 0
"""No stream has this number."""


class RequestHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields that OPEN and NEAR begin with."""

    stream: int
    verb: str
    headers: dict[str, str]
    left_ms: int
    """Milliseconds left until the deadline; -1: no deadline."""
    size: int
    """Bytes of the whole body."""
    flight: int
    """Bytes of the body that are sent without waiting for credit, those of this frame included."""
    window: int
    """Bytes of the response that may be sent before the first CREDIT."""


class Open(RequestHead, array_like=True, tag=0, frozen=True, gc=False):
    body: memoryview = memoryview(b"")


class Chunk(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    stream: int
    index: int
    body: memoryview = memoryview(b"")


class Credit(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    stream: int
    """ALL_STREAMS, to the caller: `total` is how much of its requests may be on the way before the instance reacts to them."""
    total: int


class Cancel(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    stream: int


class Data(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    stream: int
    seq: int
    """How many CHUNK and DATA frames of this stream came before: a lost one shows, the last one too."""
    body: memoryview = memoryview(b"")


class End(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    stream: int
    seq: int
    """As in DATA."""
    body: memoryview = memoryview(b"")


LOST = "lost"
"""Code of an ERROR: a part of the request did not arrive. It is no failure of the instance."""


class Error(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    stream: int
    code: str
    message: str
    retryable: bool
    retry_after_s: float = 1.0
    param: str = ""
    """The field that an invalid request has wrong, where one is known."""


class Beat(msgspec.Struct, array_like=True, tag=7, frozen=True, gc=False):
    streams: list[int]
    blocked: list[tuple[int, int, int]] = []
    """Streams that wait for credit: id, the total of credit that the instance knows of, and the `seq` of the next DATA."""
    needed: list[int] = []
    """For each of `blocked`, the total of credit with which everything that waits can be sent."""


class Probe(msgspec.Struct, array_like=True, tag=8, frozen=True, gc=False):
    streams: list[int]


class Known(msgspec.Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The response to a probe: each probed stream is in one of the lists."""

    streams: list[int]
    unknown: list[int]


class Near(RequestHead, array_like=True, tag=10, frozen=True, gc=False):
    arena: str
    """Token of the caller's arena."""
    unit: int
    """With `generation` and `size`, the region with the whole body."""
    generation: int
    """0: the body is not in the arena."""
    body: memoryview = memoryview(b"")


class Lent(msgspec.Struct, array_like=True, tag=11, frozen=True, gc=False):
    stream: int
    index: int
    """As in CHUNK."""
    unit: int
    size: int
    generation: int


class Far(msgspec.Struct, array_like=True, tag=12, frozen=True, gc=False):
    stream: int


class Many(msgspec.Struct, array_like=True, tag=13, frozen=True, gc=False):
    """Several DATA frames as one: tokens that come in one message cost both sides little more than one of them."""

    stream: int
    seq: int
    """The number of the first of them."""
    bodies: list[memoryview]


READS_MANY = "many"
"""The header of a request whose caller reads MANY; those of older versions do not, and instances of older versions ignore it."""
Frame: TypeAlias = Open | Chunk | Credit | Cancel | Data | End | Error | Beat | Probe | Known | Near | Lent | Far | Many
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Frame])


def size_of(body: Body) -> int:
    """Bytes in a body, whole or in pieces."""
    if isinstance(body, bytes | bytearray):
        return len(body)
    if isinstance(body, memoryview):
        return body.nbytes
    if len(body) == 1:  # as most responses are
        return memoryview(body[0]).nbytes
    return sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in body)


def joined(body: Body) -> Buffer:
    """A body as one buffer; copies only if it is in several pieces."""
    if isinstance(body, bytes | bytearray | memoryview):
        return body
    return body[0] if len(body) == 1 else b"".join(body)


encode: Callable[[Frame], bytes] = _encoder.encode
"""Returns a whole frame. Its body may be any buffer."""
encode_body: Callable[[Buffer], bytes] = _encoder.encode
"""Returns a body as an element of MANY."""
MOST_GATHERED = 255
"""Responses in a MANY frame."""
LIST_HEADS = tuple(
    bytes((0x90 | count,)) if count < 16 else struct.pack(">BH", 0xDC, count) for count in range(MOST_GATHERED + 1)
)
"""What precedes so many elements of a list."""


def encode_with_body(frame: Open | Near | Chunk | Data | End, body: Body) -> list[Buffer]:
    """`frame`, which holds no body itself, with `body` as its last element: pieces to be written one after the other."""
    size = size_of(body)
    head = _encoder.encode(frame)[:-2]  # without the two bytes that say "empty binary"
    if size < 256:
        prefix = struct.pack(">BB", 0xC4, size)
    elif size < 65536:
        prefix = struct.pack(">BH", 0xC5, size)
    else:
        prefix = struct.pack(">BI", 0xC6, size)
    pieces: Sequence[Buffer] = (body,) if isinstance(body, _BYTES) else body
    if size <= INLINE_BYTES:
        return [b"".join((head, prefix, *pieces))]
    return [head + prefix, *pieces]


_BYTES = (bytes, bytearray, memoryview)


def message_head(frames: int) -> bytes:
    """What precedes that many frames in a message."""
    if frames < 16:
        return bytes((0x90 | frames,))
    if frames < 65536:
        return struct.pack(">BH", 0xDC, frames)
    return struct.pack(">BI", 0xDD, frames)


def decode(message: Buffer) -> list[Frame]:
    """The frames of a message. Their bodies are views into it. Raises InvalidRequest for anything that is not a message."""
    try:
        return _decoder.decode(message)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise InvalidRequest(f"not a message of the request plane: {error}") from None


T = TypeVar("T")


def batched(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield `items` in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


class BodyPieces:
    """Takes a body apart from the front, without copying it."""

    __slots__ = ("_at", "_index", "_pieces", "chunks", "left")

    def __init__(self, body: Body) -> None:
        pieces: Sequence[Buffer] = (body,) if isinstance(body, _BYTES) else body
        self._pieces = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        self._index = 0
        self._at = 0
        self.left = sum(piece.nbytes for piece in self._pieces)
        self.chunks = 0
        """CHUNK frames that were made of it."""

    def chunk(self, stream: int, size: int) -> list[Buffer]:
        """The next `size` bytes as a CHUNK frame of a stream."""
        self.chunks += 1
        return encode_with_body(Chunk(stream, self.chunks - 1), self.take(size))

    def take(self, size: int) -> list[Buffer]:
        """The next `size` bytes, or what is left."""
        taken: list[Buffer] = []
        size = min(size, self.left)
        self.left -= size
        while size:
            piece = self._pieces[self._index]
            end = min(piece.nbytes, self._at + size)
            taken.append(piece[self._at : end])
            size -= end - self._at
            if end == piece.nbytes:
                self._index += 1
                self._at = 0
            else:
                self._at = end
        return taken
