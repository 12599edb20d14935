"""What is sent: never more than the client's windows, and all of it in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import Overloaded
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.sender import Outgoing, Sender
from dynamo.frontend.api.rpc.http2.windows import ActionBudget, ReceiveWindow
from dynamo.frontend.config import CapacityOptions


class Wire(asyncio.WriteTransport):
    """A transport that is always ready, and the client behind it: it checks windows and keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.window = frames.DEFAULT_WINDOW_BYTES
        self.windows: dict[int, int] = {}
        self.data: dict[int, bytearray] = {}
        self.blocks: dict[int, list[list[tuple[str, str]]]] = {}
        self.ended: set[int] = set()
        self._decoder = hpack.Decoder()

    def writelines(self, pieces: Iterable[Buffer]) -> None:  # type: ignore[override]
        self.write(b"".join(pieces))

    def write(self, data: Buffer) -> None:  # type: ignore[override]
        rest = bytes(data)
        while rest:
            size, kind, flags = int.from_bytes(rest[:3], "big"), rest[3], rest[4]
            stream, payload, rest = int.from_bytes(rest[5:9], "big"), rest[9 : 9 + size], rest[9 + size :]
            assert stream not in self.ended, "something follows the end of a stream"
            if kind == frames.DATA:
                self.window -= size
                self.windows[stream] -= size
                assert size <= frames.DEFAULT_FRAME_BYTES
                assert self.window >= 0
                assert self.windows[stream] >= 0
                self.data.setdefault(stream, bytearray()).extend(payload)
            else:
                self.blocks.setdefault(stream, []).append(list(self._decoder.decode(payload)))  # type: ignore[arg-type]
            if flags & frames.END_STREAM:
                self.ended.add(stream)


class Turns:
    """In place of an event loop: what it was to call soon is called when a turn ends."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, function: Callable[[], None]) -> None:
        self._soon.append(function)

    def end(self) -> None:
        soon, self._soon = self._soon, []
        for function in soon:
            function()


def prefixed(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


STREAMS = (1, 3, 5)
STEPS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(STREAMS), st.integers(0, 40_000)),
    st.tuples(st.just("grow"), st.sampled_from((0, *STREAMS)), st.integers(1, 60_000)),
    st.tuples(st.just("pause"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("finish"), st.sampled_from(STREAMS), st.integers(0, 3)),
    st.tuples(st.just("drop"), st.sampled_from(STREAMS), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
)


@given(st.lists(STEPS, max_size=40), st.integers(0, 70_000))
def test_windows_are_kept_and_everything_arrives_in_order(steps: list[tuple[str, int, int]], initial: int) -> None:
    wire, capacity, turns = Wire(), Capacity(), Turns()
    sender = Sender(wire, capacity, lambda out: None, turns.call_soon)
    outs = {stream: Outgoing(stream, initial) for stream in STREAMS}
    wire.windows = dict.fromkeys(STREAMS, initial)
    sent = dict.fromkeys(STREAMS, b"")
    finished: dict[int, int] = {}
    dropped: set[int] = set()

    def grow(stream: int, more: int) -> None:
        if stream:
            wire.windows[stream] += more
            outs[stream].window.grow(more)
            sender.window_grown(outs[stream])
        else:
            wire.window += more
            sender.window.grow(more)
            sender.pump()

    def pause(value: bool) -> None:
        sender.is_paused = value
        sender.pump()

    for what, stream, number in steps:
        if what == "grow":
            grow(stream, number)
        elif what == "pause":
            pause(bool(number))
        elif what == "turn":
            turns.end()
        elif stream not in finished and stream not in dropped:
            if what == "send":
                content = bytes((len(sent[stream]) % 251,)) * number
                sent[stream] += prefixed(content)
                sender.send(outs[stream], content)
            elif what == "finish":
                finished[stream] = number
                sender.finish(outs[stream], number, "", ())
            else:
                dropped.add(stream)
                sender.drop(outs[stream])
    pause(False)
    for stream in (0, *STREAMS):
        grow(stream, 2**24)
    turns.end()
    for stream in STREAMS:
        received = bytes(wire.data.get(stream, b""))
        assert sent[stream].startswith(received)
        if stream not in dropped:
            assert received == sent[stream]
    for stream, status in finished.items():
        assert wire.blocks[stream][-1][-1] == ("grpc-status", str(status))
    assert wire.ended == set(finished)
    assert capacity.buffered_bytes == 0


def test_a_long_response_that_waits_counts_or_is_refused_before_anything_is_sent() -> None:
    wire, capacity, turns = Wire(), Capacity(CapacityOptions(max_buffered_bytes=2**20)), Turns()
    sender = Sender(wire, capacity, lambda out: None, turns.call_soon)
    first, second = Outgoing(1, 0), Outgoing(3, 0)
    sender.send(first, bytes(700_000))
    assert capacity.buffered_bytes == 700_005
    with pytest.raises(Overloaded):
        sender.respond(second, bytes(700_000), ())
    turns.end()
    assert 3 not in wire.blocks
    sender.drop(first)
    assert capacity.buffered_bytes == 0


def test_streams_take_turns() -> None:
    wire = Wire()
    sender = Sender(wire, Capacity(), lambda out: None, Turns().call_soon)
    outs = [Outgoing(stream, 2**24) for stream in (1, 3)]
    wire.windows = {1: 2**24, 3: 2**24}
    sender.is_paused = True
    for out in outs:
        sender.send(out, bytes(2**20))
    sender.is_paused = False
    for _ in range(8):
        wire.window += 2**17
        sender.window.grow(2**17)
        sender.pump()
    assert abs(len(wire.data[1]) - len(wire.data[3])) <= 2**18


class Counting(Wire):
    """A wire that counts writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, data: Buffer) -> None:  # type: ignore[override]
        self.writes += 1
        super().write(data)


def test_responses_of_one_turn_are_one_write() -> None:
    wire, turns = Counting(), Turns()
    sender = Sender(wire, Capacity(), lambda out: None, turns.call_soon)
    wire.windows = dict.fromkeys(STREAMS, 65_535)
    for stream in STREAMS:
        sender.respond(Outgoing(stream, 65_535), b"hello", ())
    assert not wire.writes
    turns.end()
    assert wire.writes == 1
    assert wire.ended == set(STREAMS)


def test_a_response_leaves_at_once_when_its_connection_waits_for_no_other() -> None:
    wire, turns = Counting(), Turns()
    sender = Sender(wire, Capacity(), lambda out: sender.flush(), turns.call_soon)
    wire.windows = {1: 65_535}
    sender.respond(Outgoing(1, 65_535), b"hello", ())
    assert wire.writes == 1
    turns.end()
    assert wire.writes == 1


def test_long_responses_of_a_turn_share_a_write_until_they_are_too_many_bytes() -> None:
    wire, turns = Counting(), Turns()
    sender = Sender(wire, Capacity(), lambda out: None, turns.call_soon)
    wire.window += 2**20
    sender.window.grow(2**20)
    for stream in range(1, 17, 2):
        wire.windows[stream] = 65_535
        sender.respond(Outgoing(stream, 65_535), bytes(40_000), ())
    assert wire.writes == 1
    assert wire.data.keys() == set(range(1, 15, 2))
    turns.end()
    assert wire.writes == 2
    assert wire.ended == set(range(1, 17, 2))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30_000))))
def test_a_window_that_is_granted_never_exceeds_what_is_wanted(steps: list[tuple[bool, int]]) -> None:
    window = ReceiveWindow(65_535)
    allowed = 65_535
    for takes, number in steps:
        if takes:
            number = min(number, allowed)
            assert window.take(number)
            allowed -= number
        else:
            allowed += window.grant(65_535)
        assert allowed == window.left <= 65_535
        assert allowed > 0 or window.grant(65_535) > 0, "the client is stuck"
        allowed = window.left
    assert not window.take(window.left + 1)


def test_a_budget_refills_with_time() -> None:
    budget = ActionBudget(3, per_s=2.0)
    assert [budget.spend(100.0) for _ in range(4)] == [True, True, True, False]
    assert [budget.spend(101.5) for _ in range(3)] == [True, True, False]
