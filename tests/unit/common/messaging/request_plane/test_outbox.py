"""Which frames share a message, and when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.frames import Cancel, decode, encode
from dynamo.common.messaging.request_plane.outbox import FRAMES, Outbox


class Bus:
    """In place of the connection: it keeps the streams that the frames of each message name."""

    def __init__(self) -> None:
        self.is_connected = True
        self.max_payload = 2**20
        self.messages: list[list[int]] = []
        self.batches: list[int] = []

    def publish_nowait(self, subject: str, pieces: Sequence[Buffer], reply: str) -> None:
        self.batches.append(int(reply))
        frames = decode(b"".join(pieces))
        self.messages.append([frame.stream for frame in frames if isinstance(frame, Cancel)])


def outbox_on(bus: Bus) -> Outbox:
    return Outbox(cast(Connection, bus), "peer", str)


def frame(stream: int) -> bytes:
    return encode(Cancel(stream))


async def turn() -> None:
    """Let the event loop end its turn."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_frames_of_one_turn_leave_a_few_at_a_time_and_the_rest_at_its_end() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for stream in range(3 * FRAMES + 1):
        outbox.add(frame(stream))
    assert [len(message) for message in bus.messages] == [FRAMES, 2 * FRAMES]
    await turn()
    assert [len(message) for message in bus.messages] == [FRAMES, 2 * FRAMES, 1]
    assert [stream for message in bus.messages for stream in message] == list(range(3 * FRAMES + 1))


async def test_a_turn_as_long_as_the_last_one_leaves_in_two_halves() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for _ in range(2):
        bus.messages.clear()
        for stream in range(6 * FRAMES):
            outbox.add(frame(stream))
        await turn()
    assert [len(message) for message in bus.messages] == [3 * FRAMES, 3 * FRAMES]


async def test_after_a_short_turn_a_message_leaves_with_few_frames_again() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for frames in (6 * FRAMES, 1):
        for stream in range(frames):
            outbox.add(frame(stream))
        await turn()
    bus.messages.clear()
    for stream in range(FRAMES):
        outbox.add(frame(stream))
    assert [len(message) for message in bus.messages] == [FRAMES]


async def test_only_urgent_frames_make_a_message_leave_before_the_end_of_the_turn() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for stream in range(3 * FRAMES):
        outbox.add(frame(stream), patient=True)
    outbox.add(frame(100))
    assert not bus.messages
    for stream in range(101, 100 + FRAMES):
        outbox.add(frame(stream))
    assert bus.messages == [[*range(3 * FRAMES), *range(100, 100 + FRAMES)]]


async def test_a_long_turn_costs_few_messages() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for stream in range(128):  # 64 short responses, of two frames each
        outbox.add(frame(stream))
    await turn()
    assert len(bus.messages) == 6


async def test_patient_frames_of_one_turn_share_one_message_however_many() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for stream in range(3 * FRAMES):
        outbox.add(frame(stream), patient=True)
    assert not bus.messages
    await turn()
    assert bus.messages == [list(range(3 * FRAMES))]


async def test_a_frame_that_leads_another_one_leaves_with_it_and_does_not_count() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    for stream in range(0, 6 * FRAMES, 2):
        outbox.lead(frame(stream))
        outbox.add(frame(stream + 1))
    assert bus.messages == [list(range(2 * FRAMES)), list(range(2 * FRAMES, 6 * FRAMES))]
    outbox.lead(frame(1))
    outbox.add(frame(2), at_once=True)
    assert bus.messages[2:] == [[1, 2]]


async def test_a_frame_that_leaves_at_once_takes_along_what_waits() -> None:
    bus = Bus()
    outbox = outbox_on(bus)
    outbox.add(frame(1))
    outbox.add(frame(2), at_once=True)
    assert bus.messages == [[1, 2]]
    await turn()
    assert bus.messages == [[1, 2]]


async def test_frames_that_encoding_another_one_adds_are_a_batch_of_their_own() -> None:
    bus = Bus()
    outbox = outbox_on(bus)

    class Failing:
        def encoded(self, batch: int) -> None:
            self.batch = batch
            outbox.add(frame(7), at_once=True)

    class Opening:
        def encoded(self, batch: int) -> bytes:
            self.batch = batch
            return frame(8)

    failing, opening = Failing(), Opening()
    outbox.add(failing)
    outbox.add(opening, at_once=True)
    assert bus.messages == [[7], [8]]
    assert failing.batch == opening.batch == bus.batches[1] != bus.batches[0]


async def test_frames_wait_for_the_connection() -> None:
    bus = Bus()
    bus.is_connected = False
    outbox = outbox_on(bus)
    for stream in range(FRAMES):
        outbox.add(frame(stream), at_once=True)
    await turn()
    assert not bus.messages
    bus.is_connected = True
    outbox.flush()
    assert bus.messages == [list(range(FRAMES))]
