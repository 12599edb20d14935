"""The request plane between processes that share memory. In virtual time, with real arenas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dynamo.common.errors import DeadlineExceeded, DynamoError, InstanceGone
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.limits import KIB, MIB
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import SharedMemoryOptions
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from tests.support.arenas import memory_folder
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.virtual_time import in_virtual_time

T = TypeVar("T")
ENDPOINT = Endpoint()
INSTANCE = InstanceId(1)
LARGE = 600 * KIB


@dataclass
class Plane:
    bus: FakeBus
    client: RequestClient
    server: RequestServer
    ours: SharedMemory
    """The frontend's."""
    theirs: SharedMemory
    """The worker's."""
    die: Callable[[], Awaitable[None]]
    """Close the worker's arena, as the kernel does when its process ends."""

    def open(self, verb: str, body: bytes, deadline_s: float | None = None, *headers: str) -> RequestStream:
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        subject = ENDPOINT.rpc_subject(INSTANCE)
        named = dict.fromkeys(headers, "")
        return self.client.open(INSTANCE, subject, verb, body, headers=named, deadline=deadline, arena=self.theirs.token)

    def lose(self, kind: type) -> None:
        """Lose the next message that holds a frame of this kind."""
        left = 1

        def is_lost(subject: str, payload: bytes) -> bool:
            nonlocal left
            if left and any(isinstance(frame, kind) for frame in frames.decode(payload)):
                left = 0
                return True
            return False

        self.bus.is_lost = is_lost

    @property
    def regions(self) -> tuple[int, int]:
        """How many are lent by the frontend, and by the worker."""
        for memory in (self.ours, self.theirs):
            memory.sweep()
        return len(self.ours.arena), len(self.theirs.arena)


@asynccontextmanager
async def plane(handlers: Mapping[str, Handler], *, size: int = 16 * MIB, theirs_in: Path | None = None) -> AsyncIterator[Plane]:
    """`theirs_in`: the worker's arena is in another folder, as in another container."""
    bus = FakeBus()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(memory_folder())
        ours = await stack.enter_async_context(open_shared_memory(SharedMemoryOptions(dir=folder, size=size)))
        life = await stack.enter_async_context(AsyncExitStack())
        theirs = await life.enter_async_context(open_shared_memory(SharedMemoryOptions(dir=theirs_in or folder, size=size)))
        assert ours is not None and theirs is not None
        server = await stack.enter_async_context(serve_requests(FakeConnection(bus), ENDPOINT, INSTANCE, handlers, memory=theirs))
        client = await stack.enter_async_context(open_client(FakeConnection(bus), ENDPOINT.namespace, memory=ours))
        yield Plane(bus, client, server, ours, theirs, life.aclose)


async def echo(request: Incoming) -> None:
    request.end(request.body)


async def measure(request: Incoming) -> None:
    request.end(b"%d" % len(request.body))


async def repeat(request: Incoming) -> None:
    """The body, a hundred times."""
    for _ in range(100):
        if not request.send_nowait(request.body):
            await request.ready()


class Held:
    """A handler that waits with the body in its hands."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.bodies: list[object] = []

    async def __call__(self, request: Incoming) -> None:
        self.bodies.append(request.body)
        await self.release.wait()
        request.end(request.body)


async def beside(turns: list[int], work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, and add the turns that the event loop had meanwhile."""
    task = asyncio.ensure_future(work)
    count = 0
    while not task.done():
        await asyncio.sleep(0)
        count += 1
    turns.append(count)
    return task.result()


def content(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


@pytest.mark.parametrize("size", [0, 1, 32 * KIB - 1, 32 * KIB, 32 * KIB + 1, LARGE, 3 * MIB + 7])
@in_virtual_time
async def test_a_body_of_any_size_comes_back_unchanged_and_leaves_nothing(size: int) -> None:
    async with plane({"echo": echo}) as p:
        for _ in range(3):
            assert bytes(await p.open("echo", content(size)).result()) == content(size)
        by_reference = 3 * size if size >= 32 * KIB else 0
        assert (p.ours.bytes["lent"], p.ours.bytes["taken"]) == (by_reference, by_reference)
        assert p.regions == (0, 0)
        assert p.client.free_budget_bytes == RequestClient(FakeConnection(p.bus), "x", p.client.limits).free_budget_bytes


@pytest.mark.parametrize("is_stream", [False, True])
@in_virtual_time
async def test_a_large_response_is_copied_beside_other_work(is_stream: bool) -> None:
    turns: list[int] = []
    large = content(48 * MIB)

    async def respond(request: Incoming) -> None:
        body = await beside(turns, request.lend_in_steps([b"12", large], last=not is_stream))
        assert not body, "it is where the caller reads it"
        if is_stream:
            request.send_nowait(body)
        else:
            request.end(body)

    async with plane({"respond": respond}, size=128 * MIB) as p:
        async with p.open("respond", b"") as stream:
            if is_stream:
                [response] = await stream.read()
            else:
                response = await stream.result()
            assert bytes(response) == b"12" + large
        del response, stream
        assert p.theirs.bytes["lent"] == len(large) + 2
        assert turns[0] > 2
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_response_that_finds_no_room_or_no_neighbour_is_returned_whole(tmp_path: Path) -> None:
    large = content(12 * MIB)

    async def respond(request: Incoming) -> None:
        body = await request.lend_in_steps(large, last=True)
        assert body is large
        request.end(b"in messages")

    for room, folder in ((4 * MIB, None), (64 * MIB, tmp_path)):
        async with plane({"respond": respond}, size=room, theirs_in=folder) as p:
            assert await p.open("respond", b"").result() == b"in messages"


@in_virtual_time
async def test_a_caller_that_leaves_while_its_response_is_copied_leaves_no_region() -> None:
    begun = asyncio.Event()
    large = content(60 * MIB)

    async def respond(request: Incoming) -> None:
        begun.set()
        await request.lend_in_steps(large, last=True)
        raise AssertionError("it was cancelled")

    async with plane({"respond": respond}, size=128 * MIB) as p:
        stream = p.open("respond", b"")
        await begun.wait()
        stream.cancel()
        await p.server.drained()
        assert p.regions == (0, 0)
        assert p.theirs.used_bytes == 0


@in_virtual_time
async def test_the_handler_gets_a_view_of_the_callers_arena_and_the_caller_one_of_the_workers() -> None:
    held = Held()
    held.release.set()
    async with plane({"hold": held}) as p:
        response = await p.open("hold", content(LARGE)).result()
        assert isinstance(response, memoryview) and response.readonly
        assert isinstance(held.bodies[0], memoryview) and held.bodies[0].readonly
        assert p.regions == (1, 1), "both are being read"
        held.bodies.clear()
        del response
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_body_that_the_model_keeps_does_not_change() -> None:
    held = Held()
    held.release.set()
    async with plane({"hold": held}) as p:
        await p.open("hold", content(LARGE)).result()
        for _ in range(20):
            await p.open("hold", bytes(LARGE)).result()
        assert held.bodies[0] == content(LARGE)


@in_virtual_time
async def test_a_full_arena_sends_bodies_in_messages() -> None:
    held = Held()
    async with plane({"hold": held, "echo": echo}, size=2 * MIB) as p:
        streams = [p.open("hold", content(LARGE)) for _ in range(10)]
        await asyncio.sleep(1)
        lent = len(p.ours.arena)
        assert 0 < lent < 10 and p.ours.fallbacks == {"full": 10 - lent}
        held.release.set()
        assert all([bytes(await stream.result()) == content(LARGE) for stream in streams])
        held.bodies.clear()
        assert bytes(await p.open("echo", content(5 * MIB)).result()) == content(5 * MIB)
        del streams
        assert p.regions == (0, 0)


@in_virtual_time
async def test_processes_that_do_not_share_a_folder_use_messages() -> None:
    with memory_folder() as elsewhere:
        async with plane({"echo": echo}, theirs_in=elsewhere) as p:
            assert bytes(await p.open("echo", content(LARGE)).result()) == content(LARGE)
            assert (p.ours.bytes, p.theirs.bytes) == ({}, {})
            assert p.ours.fallbacks == {"unreachable": 1}


@in_virtual_time
async def test_a_request_whose_body_cannot_be_read_is_sent_again_in_messages() -> None:
    async with plane({"echo": echo}) as p:
        p.theirs.neighbour = lambda token: None  # type: ignore[method-assign]  # as if it could not be opened
        streams = [p.open("echo", content(LARGE)) for _ in range(3)]
        for stream in streams:
            assert bytes(await stream.result()) == content(LARGE)
        assert p.theirs.bytes == {}
        assert p.ours.bytes["lent"] == 3 * LARGE
        assert bytes(await p.open("echo", content(LARGE)).result()) == content(LARGE)
        assert p.ours.bytes["lent"] == 3 * LARGE, "one refusal is enough"
        await asyncio.sleep(3)
        assert p.regions == (0, 0)


@in_virtual_time
async def test_refusals_that_no_instance_has_reason_for_change_nothing() -> None:
    held = Held()
    async with plane({"echo": held}) as p:
        small, large = p.open("echo", b"x"), p.open("echo", content(LARGE))
        for stream in (small, large, small, large):
            stream.on_far()
        await asyncio.sleep(0.1)
        for stream in (small, large, large):
            stream.on_far()
        held.release.set()
        assert (bytes(await small.result()), bytes(await large.result())) == (b"x", content(LARGE))
        assert len(held.bodies) == 2
        held.bodies.clear()
        del small, large, stream
        await asyncio.sleep(3)
        assert p.regions == (0, 0)
        assert p.client.unacknowledged_bytes == 0


@in_virtual_time
async def test_a_request_that_arrives_twice_is_served_once() -> None:
    held = Held()
    async with plane({"echo": held}) as p:
        publish = p.bus.publish

        def publish_twice(*message: Any) -> None:
            publish(*message)
            publish(*message)

        p.bus.publish = publish_twice  # type: ignore[method-assign]
        stream = p.open("echo", content(LARGE))
        await asyncio.sleep(0.1)
        p.bus.publish = publish  # type: ignore[method-assign]
        held.release.set()
        assert bytes(await stream.result()) == content(LARGE)
        assert len(held.bodies) == 1 and p.theirs.fallbacks == {}


@in_virtual_time
async def test_a_response_that_cannot_be_read_fails_and_the_next_comes_in_messages() -> None:
    async with plane({"echo": echo}) as p:
        lend = p.theirs.lend
        p.theirs.lend = lambda *loan: (lent := lend(*loan)) and lent._replace(generation=99)  # type: ignore[method-assign]
        with pytest.raises(InstanceGone) as raised:
            await p.open("echo", content(LARGE)).result()
        assert raised.value.retryable
        assert bytes(await p.open("echo", content(LARGE)).result()) == content(LARGE)


@pytest.mark.parametrize("kind", [frames.Near, frames.Lent, frames.End])
@in_virtual_time
async def test_regions_of_lost_messages_come_back(kind: type) -> None:
    async with plane({"echo": echo}) as p:
        p.lose(kind)
        stream = p.open("echo", content(LARGE), deadline_s=1)
        with pytest.raises(DeadlineExceeded):
            await stream.result()
        del stream
        await asyncio.sleep(70)
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_cancelled_request_gives_its_region_back_when_the_handler_lets_go() -> None:
    held = Held()
    async with plane({"hold": held}) as p:
        stream = p.open("hold", content(LARGE))
        await asyncio.sleep(0.1)
        stream.cancel()
        assert p.regions == (1, 0)
        await asyncio.sleep(0.1)
        assert p.regions == (1, 0)
        held.bodies.clear()
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_response_to_a_caller_that_has_left_meanwhile_gives_its_region_back() -> None:
    held = Held()
    async with plane({"hold": held}) as p:
        p.lose(frames.Cancel)
        stream = p.open("hold", content(LARGE))
        await asyncio.sleep(0.1)
        stream.cancel()
        await asyncio.sleep(0.1)
        held.bodies.clear()
        held.release.set()
        await asyncio.sleep(0.1)
        assert p.theirs.bytes["lent"] == LARGE
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_slow_reader_of_a_stream_does_not_fill_the_arena() -> None:
    async with plane({"repeat": repeat, "echo": echo}) as p:
        stream = p.open("repeat", content(LARGE))
        await asyncio.sleep(1)
        assert len(p.theirs.arena) == 4
        assert bytes(await p.open("echo", content(LARGE)).result()) == content(LARGE)
        count = 0
        while responses := await stream.read():
            assert all(bytes(response) == content(LARGE) for response in responses)
            count += len(responses)
        assert count == 100
        responses.clear()
        await asyncio.sleep(1)
        assert p.regions == (0, 0)


@in_virtual_time
async def test_an_instance_that_dies_holds_no_region() -> None:
    held = Held()
    async with plane({"hold": held}) as p:
        p.open("hold", content(LARGE))
        await asyncio.sleep(0.1)
        await p.die()
        assert len(p.ours.arena) == 1
        p.ours.sweep()
        assert len(p.ours.arena) == 0


@in_virtual_time
async def test_requests_to_an_instance_without_subscription_leave_no_region() -> None:
    async with plane({"echo": echo}) as p:
        stream = p.client.open(InstanceId(2), ENDPOINT.rpc_subject(InstanceId(2)), "echo", content(LARGE), arena=p.theirs.token)
        with pytest.raises(DynamoError):
            await stream.result()
        await asyncio.sleep(3)
        assert p.regions == (0, 0)


COPIED_IN_STEPS = 9 * MIB


@in_virtual_time
async def test_large_bodies_are_copied_in_turns_and_the_event_loop_goes_on_between_them() -> None:
    async with plane({"measure": measure}, size=128 * MIB) as p:
        streams = [p.open("measure", content(COPIED_IN_STEPS)) for _ in range(3)]
        turns = 0
        while p.ours.bytes["lent"] < 3 * COPIED_IN_STEPS:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 3 * COPIED_IN_STEPS // (4 * MIB)
        assert [bytes(await stream.result()) for stream in streams] == 3 * [b"%d" % COPIED_IN_STEPS]
        assert p.regions == (0, 0)


@in_virtual_time
async def test_a_request_that_is_cancelled_while_its_body_is_copied_leaves_no_region() -> None:
    async with plane({"echo": echo}, size=128 * MIB) as p:
        stream = p.open("echo", content(COPIED_IN_STEPS))
        for _ in range(2):
            await asyncio.sleep(0)
        assert p.ours.used_bytes >= COPIED_IN_STEPS and not p.ours.bytes["lent"]
        stream.cancel()
        await asyncio.sleep(1)
        assert p.ours.used_bytes == 0
        assert bytes(await p.open("echo", content(COPIED_IN_STEPS)).result()) == content(COPIED_IN_STEPS)


@in_virtual_time
async def test_a_large_body_that_finds_no_room_or_cannot_be_read_travels_in_messages() -> None:
    async with plane({"measure": measure}, size=8 * MIB) as p:
        assert bytes(await p.open("measure", content(COPIED_IN_STEPS)).result()) == b"%d" % COPIED_IN_STEPS
        assert p.ours.fallbacks == {"full": 1}
    async with plane({"measure": measure}, size=128 * MIB) as p:
        p.theirs.take = lambda owner, reference: None  # type: ignore[method-assign]
        assert bytes(await p.open("measure", content(COPIED_IN_STEPS)).result()) == b"%d" % COPIED_IN_STEPS
        assert p.ours.bytes["lent"] == COPIED_IN_STEPS, "it is not copied again"


@pytest.mark.parametrize("in_steps", [False, True])
@in_virtual_time
async def test_small_responses_around_one_in_shared_memory_share_a_message_with_it(*, in_steps: bool) -> None:
    bodies = [b"a", b"b", content(LARGE), b"c", b"d", content(LARGE), content(LARGE), b"", b"e", b"f"]

    async def send(request: Incoming) -> None:
        for body in bodies:
            lent = await request.lend_in_steps(body) if in_steps and len(body) == LARGE else body
            if not request.send_nowait(lent):
                await request.ready()

    async with plane({"send": send}) as p:
        stream = p.open("send", b"", None, frames.READS_MANY)
        received: list[bytes] = []
        while read := await stream.read():
            received += map(bytes, read)
        assert received == bodies
