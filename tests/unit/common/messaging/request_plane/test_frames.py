from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.frames import BodyPieces

ids = st.integers(0, 2**63)
bodies = st.binary(max_size=400) | st.integers(4090, 70_000).map(lambda size: b"\x05" * size)


@given(st.lists(st.tuples(ids, bodies), max_size=40))
def test_a_message_gives_back_the_frames_it_was_made_of(sent: list[tuple[int, bytes]]) -> None:
    pieces = [piece for id_, body in sent for piece in frames.encode_with_body(frames.Data(id_, 7), body)]
    received = frames.decode(b"".join([frames.message_head(len(sent)), *pieces]))
    assert [(frame.stream, bytes(frame.body)) for frame in received if isinstance(frame, frames.Data)] == sent


@given(st.lists(st.binary(max_size=9000), max_size=6))
def test_a_body_in_pieces_arrives_as_one(parts: list[bytes]) -> None:
    head = frames.Open(1, "infer", {"a": "b"}, -1, 0, 0, 0)
    message = b"".join([frames.message_head(1), *frames.encode_with_body(head, parts)])
    (frame,) = frames.decode(message)
    assert isinstance(frame, frames.Open)
    assert frame.body == b"".join(parts)


@given(st.binary(max_size=300), st.integers(0, 9))
def test_short_and_long_encodings_of_data_are_the_same(body: bytes, seq: int) -> None:
    long = frames.encode_with_body(frames.Data(3, seq), body)
    assert frames.encode(frames.Data(3, seq, memoryview(body))) == b"".join(long)


def test_a_large_body_is_not_copied_into_its_frame() -> None:
    body = bytes(100_000)
    pieces = frames.encode_with_body(frames.Data(3, 0), body)
    assert pieces[1] is body


@given(st.binary(max_size=200))
def test_random_bytes_are_frames_or_a_clear_error(data: bytes) -> None:
    try:
        frames.decode(data)
    except InvalidRequest as error:
        assert "request plane" in str(error)


@pytest.mark.parametrize(
    "hostile",
    [b"", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\x91\x92\x63\x01", b"\x90\x90", b"\x91\x92\x03\xa1x"],
    ids=["empty", "four billion frames", "nested 100,000 deep", "unknown kind", "trailing bytes", "text for a number"],
)
def test_hostile_messages_are_refused(hostile: bytes) -> None:
    with pytest.raises(InvalidRequest):
        frames.decode(hostile)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_pieces_are_taken_in_order_and_completely(body: list[bytes], sizes: list[int]) -> None:
    pieces = BodyPieces(body)
    taken = b"".join(b"".join(pieces.take(size)) for size in sizes)
    rest = b"".join(pieces.take(pieces.left))
    assert taken + rest == b"".join(body)
    assert pieces.left == 0


def test_the_chunks_of_a_body_are_numbered_by_the_body_itself() -> None:
    pieces = BodyPieces([b"first", b"second"])
    pieces.take(3)  # it travels with OPEN, and is no chunk
    frames_sent = [b"".join(pieces.chunk(7, 4)) for _ in range(2)]
    message = frames.message_head(len(frames_sent)) + b"".join(frames_sent)
    assert [(chunk.stream, chunk.index, bytes(chunk.body)) for chunk in frames.decode(message)] == [  # type: ignore[union-attr]
        (7, 0, b"stse"),
        (7, 1, b"cond"),
    ]
    assert (pieces.left, pieces.chunks) == (0, 2)
