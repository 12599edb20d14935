"""The reader of frames and that of messages: the same bytes are the same events, however they are split."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.frames import PREFACE, ConnectionFailure, DataSink, ErrorCode, FrameReader, encode_frame
from dynamo.frontend.api.rpc.http2.messages import (
    STEP_BYTES,
    CorruptMessage,
    MessageReader,
    PlainMemory,
    deflate_steps,
    inflate_steps,
)

MAX_FRAME = 16_384


@dataclass
class Recorder:
    """A connection that notes what a reader reports. Every second stream receives into memory of its own."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    data: dict[int, bytearray] = field(default_factory=dict)

    def frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.events.append((kind, flags, stream, payload))

    def skipped(self) -> None:
        self.events.append(("skipped",))

    def data_begun(self, stream: int, size: int, content: int, *, ends: bool) -> DataSink:
        self.events.append(("data", stream, size, content, ends))
        kept = self.data.setdefault(stream, bytearray())
        return Direct(kept) if stream % 4 == 1 else Fed(kept)

    def data_ended(self, stream: int) -> None:
        self.events.append(("end", stream, bytes(self.data.get(stream, b""))))


@dataclass
class Fed:
    kept: bytearray

    def feed(self, data: memoryview) -> None:
        self.kept += data

    def space(self) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        raise AssertionError


class Direct(Fed):
    def space(self) -> memoryview | None:
        self.memory = memoryview(bytearray(50))
        return self.memory

    def filled(self, count: int) -> None:
        self.kept += self.memory[:count]


def receive(pieces: list[bytes]) -> tuple[Recorder, str]:
    """What a reader reports for these reads, and the text of the failure, if there was one."""
    recorder = Recorder()
    reader = FrameReader(recorder, memoryview(bytearray(64 * 1024)), MAX_FRAME)
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            space = reader.get_buffer()
            size = min(len(space), len(rest))
            space[:size] = rest[:size]
            rest = rest[size:]
            try:
                reader.buffer_updated(size)
                while reader.is_behind:
                    reader.go_on()
            except ConnectionFailure as failure:
                return recorder, f"{failure.code.name}: {failure}"
    return recorder, ""


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(stream) + 1) for cut in cuts} | {len(stream)})
    return [stream[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


@st.composite
def one_frame(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 12))
    payload = draw(st.binary(max_size=300))
    flags = draw(st.sampled_from([0, frames.END_STREAM, frames.END_HEADERS, frames.PADDED, frames.PADDED | frames.END_STREAM]))
    if kind == frames.DATA and flags & frames.PADDED and draw(st.booleans()):
        payload = bytes((draw(st.integers(0, max(0, min(255, len(payload))))),)) + payload
    return encode_frame(kind, flags, draw(st.integers(0, 9)), payload)


@given(st.lists(one_frame(), max_size=8).map(b"".join), st.lists(st.integers(0, 4000), max_size=12), st.binary(max_size=12))
def test_the_same_bytes_are_the_same_frames_however_they_are_split(stream: bytes, cuts: list[int], rest: bytes) -> None:
    stream = PREFACE + stream + rest
    whole, failure = receive([stream])
    parts, part_failure = receive(split(stream, cuts))
    single, single_failure = receive([bytes((byte,)) for byte in stream])
    assert failure == part_failure == single_failure
    if not failure:
        assert whole == parts == single


def test_a_frame_is_read_from_each_of_its_parts() -> None:
    recorder, failure = receive([PREFACE + encode_frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\3abcxyz")])
    assert not failure
    assert recorder.events == [("data", 1, 7, 3, True), ("end", 1, b"abc")]


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (b"GET / HTTP/1.1\r\n", ErrorCode.PROTOCOL_ERROR),
        (PREFACE + encode_frame(frames.DATA, frames.PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
        (PREFACE + encode_frame(frames.DATA, frames.PADDED, 1, b"\1"), ErrorCode.PROTOCOL_ERROR),
        (PREFACE + encode_frame(frames.HEADERS, 0, 1, bytes(MAX_FRAME + 1)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_bytes_that_are_no_frames_are_refused(stream: bytes, code: ErrorCode) -> None:
    assert receive([stream])[1].startswith(code.name)


def test_many_frames_are_read_in_turns() -> None:
    pings = [encode_frame(frames.PING, 0, 0, bytes((number,)) * 8) for number in range(100)]
    recorder, ticks = Recorder(), count()

    def clock() -> float:
        return next(ticks) * 0.001

    def turn_ends_at() -> float:
        return clock() + 0.004

    reader = FrameReader(recorder, memoryview(bytearray(64 * 1024)), MAX_FRAME, turn_ends_at, clock)
    received = PREFACE + b"".join(pings) + pings[0][:5]
    reader.get_buffer()[: len(received)] = received
    reader.buffer_updated(len(received))
    turns = 1
    while reader.is_behind:
        assert len(recorder.events) <= 10 * turns
        reader.go_on()
        turns += 1
    assert [event[3] for event in recorder.events] == [ping[9:] for ping in pings]


def test_without_time_nothing_is_read_and_nothing_is_lost() -> None:
    stream = PREFACE + encode_frame(frames.DATA, frames.END_STREAM, 1, b"abc") + encode_frame(frames.PING, 0, 0, bytes(8))
    recorder, ends_at = Recorder(), 0.0
    reader = FrameReader(recorder, memoryview(bytearray(64 * 1024)), MAX_FRAME, lambda: ends_at)
    for part in (stream[:30], stream[30:]):
        space = reader.get_buffer()
        space[: len(part)] = part
        reader.buffer_updated(len(part))
        assert reader.is_behind
    assert not recorder.events
    ends_at = float("inf")
    reader.go_on()
    assert not reader.is_behind
    assert recorder == receive([stream])[0]


def test_the_size_of_a_frame_is_refused_before_it_has_come() -> None:
    assert receive([PREFACE + b"\xff\xff\xff\x01\x04\0\0\0\1"])[1].startswith("FRAME_SIZE_ERROR")


# Messages


@dataclass
class Owner:
    """A call that takes messages up to 1000 bytes."""

    messages: list[tuple[bytes, bool]] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    refused: list[object] = field(default_factory=list)

    def admit_message(self, size: int, *, is_complete: bool) -> bool:
        (self.admitted if size <= 1000 else self.refused).append(size)
        return size <= 1000

    def admit_part(self, received: int, size: int) -> int:
        return size

    def message_memory(self, size: int) -> PlainMemory:
        return PlainMemory(size)

    def message_received(self, message: Buffer, *, is_compressed: bool) -> None:
        self.messages.append((bytes(message), is_compressed))

    def refuse_flag(self, flag: int) -> None:
        self.refused.append(f"flag {flag}")


def prefixed(content: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


def read(pieces: list[bytes], *, directly: bool) -> Owner:
    owner = Owner()
    reader = MessageReader(owner)
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            space = reader.space() if directly else None
            if space is None:
                reader.feed(rest)
                break
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            reader.filled(count)
            rest = rest[count:]
    return owner


@given(
    st.lists(st.tuples(st.binary(max_size=1100), st.sampled_from([0, 0, 0, 1, 2])), max_size=5),
    st.binary(max_size=20),
    st.lists(st.integers(0, 6000), max_size=12),
    st.booleans(),
)
def test_the_same_data_are_the_same_messages_however_they_are_split(
    contents: list[tuple[bytes, int]], rest: bytes, cuts: list[int], directly: bool
) -> None:
    stream = b"".join(prefixed(content, flag) for content, flag in contents) + rest
    assert read([stream], directly=False) == read(split(stream, cuts), directly=directly)


def test_the_size_of_a_message_is_refused_before_it_has_come_and_all_after_it() -> None:
    owner = read([prefixed(b"a"), b"\0\0\0\x10\0", prefixed(b"b")], directly=False)
    assert (owner.messages, owner.refused) == ([(b"a", False)], [4096])


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=2000), st.integers(1, 3000))
def test_what_was_deflated_is_inflated_again(encoding: str, part: bytes, times: int) -> None:
    content = part * times
    deflated = b"".join(deflate_steps(content, encoding))
    assert zlib.decompress(deflated, 47) == content
    pieces = list(inflate_steps(deflated, encoding))
    assert b"".join(pieces) == content
    assert all(len(piece) <= STEP_BYTES for piece in pieces)


GOOD = gzip.compress(b"hello, hello, hello, how are you?", mtime=0)  # named in the tests, which all processes collect alike


@pytest.mark.parametrize("bad", [GOOD[:-1], GOOD + b"x", b"abc", b"", GOOD[:20] + b"x" + GOOD[21:]])
def test_what_is_no_gzip_is_refused(bad: bytes) -> None:
    with pytest.raises(CorruptMessage):
        list(inflate_steps(bad, "gzip"))


def test_blocks_that_hold_nothing_are_inflated_a_step_at_a_time() -> None:
    bomb = zlib.compress(b"")[:2] + b"\0\0\0\xff\xff" * 200_000
    steps = inflate_steps(bomb, "deflate")
    assert [next(steps) for _ in range(10)] == [b""] * 10


def test_a_bomb_is_inflated_a_step_at_a_time() -> None:
    steps = inflate_steps(gzip.compress(bytes(64 * STEP_BYTES), 6), "gzip")
    assert len(next(steps)) <= STEP_BYTES
