"""Responses of one stream that leave in one message: one frame for callers that read it, and the same responses for all."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import InstanceGone
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from tests.support.virtual_time import in_virtual_time
from tests.unit.common.messaging.request_plane.test_request_plane_faults import Plane, plane

BODIES = [b"%d" % number for number in range(300)]  # more than one frame takes
MIXED = [b"a", b"b", bytes(5000), b"c", b"", b"d" * 3000, b"e" * 3000, bytes(20_000), b"f", b"g"]


async def all_of(stream: RequestStream) -> list[bytes]:
    bodies: list[bytes] = []
    while read := await stream.read():
        bodies += map(bytes, read)
    return bodies


def record(p: Plane) -> list[frames.Frame]:
    """Return a list that gets the frames of all further messages."""
    seen: list[frames.Frame] = []

    def is_lost(subject: str, payload: bytes) -> bool:
        seen.extend(frames.decode(payload))
        return False

    p.bus.is_lost = is_lost
    return seen


def sender(bodies: list[bytes], per_turn: int) -> Handler:
    async def send(request: Incoming) -> None:
        for number, body in enumerate(bodies, 1):
            if not request.send_nowait(body):
                await request.ready()
            if number % per_turn == 0:
                await asyncio.sleep(0.01)

    return send


@pytest.mark.parametrize("per_turn", [1, 2, 7, 1000])
@pytest.mark.parametrize("headers", [{}, {frames.READS_MANY: ""}], ids=["old", "new"])
@pytest.mark.parametrize("bodies", [BODIES, MIXED], ids=["small", "mixed"])
@in_virtual_time
async def test_every_response_arrives_once_and_in_order(bodies: list[bytes], headers: dict[str, str], per_turn: int) -> None:
    async with plane({"send": sender(bodies, per_turn)}) as p:
        assert await all_of(p.open("send", **headers)) == bodies


@in_virtual_time
async def test_only_callers_that_read_several_responses_as_one_get_them() -> None:
    async with plane({"send": sender(BODIES[:20], 1000)}) as p:
        seen = record(p)
        await all_of(p.open("send"))
        assert not [frame for frame in seen if isinstance(frame, frames.Many)]
        seen.clear()
        await all_of(p.open("send", **{frames.READS_MANY: ""}))
        assert [len(frame.bodies) for frame in seen if isinstance(frame, frames.Many)] == [19]  # the first waits for no other
        assert len([frame for frame in seen if isinstance(frame, frames.Data)]) == 1


@in_virtual_time
async def test_several_responses_that_are_lost_are_noticed_by_their_gap() -> None:
    async with plane({"send": sender(BODIES[:20], 10)}) as p:
        p.lose(lambda subject, frame: isinstance(frame, frames.Many))
        with pytest.raises(InstanceGone, match="lost part"):
            await all_of(p.open("send", **{frames.READS_MANY: ""}))
