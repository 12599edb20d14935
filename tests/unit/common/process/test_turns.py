"""The time in a turn of the event loop for what has come on all connections together."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.common.lifecycle import open_listener
from dynamo.common.process.turns import LoopTurns
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.http2.server import Http2Server
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.config import GrpcOptions
from tests.support.grpc_operations import unary
from tests.support.http2 import PATH, call, connected
from tests.support.turns import Loop
from tests.support.waiting import until


def read(loop: Loop, turns: LoopTurns, work_s: float) -> float:
    """Read what takes so long, in steps of 0.5 ms, until there is no time left; return what is left of it."""
    ends_at = turns.ends_at()
    while ends_at and work_s > 0:
        loop.now += 0.0005
        work_s -= 0.0005
        if loop.now > ends_at:
            break
    return work_s


def test_what_has_just_come_on_many_connections_takes_no_more_than_that_of_one() -> None:
    loop = Loop()
    turns = LoopTurns(loop.call_soon, loop.clock)
    left = [read(loop, turns, 0.1) for _ in range(50)]
    assert loop.now < 100.006
    assert left[1:] == [0.1] * 49
    loop.turn()
    assert read(loop, turns, 0.001) <= 0, "there is time again in the next turn"


def test_a_line_of_connections_moves_on_by_some_milliseconds_in_each_turn() -> None:
    loop = Loop()
    turns = LoopTurns(loop.call_soon, loop.clock)
    work = dict.fromkeys(range(20), 0.01)
    order: list[int] = []

    def go_on(number: int) -> None:
        order.append(number)
        work[number] = read(loop, turns, work[number])
        if work[number] > 0:
            turns.wait(lambda: go_on(number))

    for number in work:
        turns.wait(lambda number=number: go_on(number))  # type: ignore[misc]
    took = []
    while not loop.is_idle:
        took.append(loop.turn())
    assert max(took) < 0.006
    assert order[:20] == list(range(20)), "each has a share before the first one has another"
    assert max(work.values()) <= 0


def test_what_comes_while_others_wait_in_line_is_read_at_once() -> None:
    loop = Loop()
    turns = LoopTurns(loop.call_soon, loop.clock)
    turns.wait(lambda: None)
    assert read(loop, turns, 0.001) <= 0


class Line(LoopTurns):
    """The test says whether there is time, and when the line moves on."""

    def __init__(self) -> None:
        self.is_free = True
        self.waiting: list[Callable[[], None]] = []

    def ends_at(self) -> float:
        return float("inf") if self.is_free else 0.0

    def wait(self, go_on: Callable[[], None]) -> None:
        self.waiting.append(go_on)


async def test_all_connections_of_a_port_wait_in_one_line() -> None:
    async def say(request: Buffer | PendingMessage, context: Context) -> bytes:
        return await read_message(request)

    server = Http2Server(GrpcOptions(port=0), [unary(PATH, say)], Capacity())
    server.turns = line = Line()
    await server.listen(open_listener("127.0.0.1", 0, flag="--grpc-port"), None)
    try:
        async with connected(server.port) as first, connected(server.port) as second:
            for client in (first, second):
                client.send(call(1, b"a"))
                assert await client.status(1) == "0"
            line.is_free = False
            for client in (first, second):
                client.send(call(3, b"b"))
            await until(lambda: len(line.waiting) == 2)
            assert not server.calls
            line.is_free = True
            for go_on in line.waiting:
                go_on()
            for client in (first, second):
                assert await client.status(3) == "0"
                client.send(call(5, b"c"))
                assert await client.status(5) == "0"
    finally:
        await server.stop(0.0)
