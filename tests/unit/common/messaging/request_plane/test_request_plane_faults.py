"""The request plane over a bus that loses messages, cuts connections and hangs. In virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from dynamo.common.errors import DeadlineExceeded, EngineError, InstanceGone, InvalidRequest, Overloaded, Unavailable
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.limits import KIB, MIB, PlaneLimits
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.names import Endpoint, InstanceId
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.memory import instances_of
from tests.support.virtual_time import in_virtual_time

ENDPOINT = Endpoint()


@dataclass
class Plane:
    bus: FakeBus
    client: RequestClient
    frontend: FakeConnection
    servers: list[RequestServer]
    workers: list[FakeConnection]

    def open(
        self, verb: str, body: bytes = b"", deadline_s: float | None = None, worker: int = 0, **headers: str
    ) -> RequestStream:
        deadline = None if deadline_s is None else now() + deadline_s
        id_ = InstanceId(worker)
        return self.client.open(id_, ENDPOINT.rpc_subject(id_), verb, body, headers=headers, deadline=deadline)

    def lose(self, when: Callable[[str, frames.Frame], bool], count: int = 1) -> None:
        """Lose the next messages that hold such a frame."""
        left = count

        def is_lost(subject: str, payload: bytes) -> bool:
            nonlocal left
            if left and any(when(subject, frame) for frame in frames.decode(payload)):
                left -= 1
                return True
            return False

        self.bus.is_lost = is_lost


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def plane(
    handlers: Mapping[str, Handler], *, workers: int = 1, client: PlaneLimits | None = None, server: PlaneLimits | None = None
) -> AsyncIterator[Plane]:
    bus = FakeBus()
    async with AsyncExitStack() as stack:
        connections = [FakeConnection(bus) for _ in range(workers)]
        servers = [
            await stack.enter_async_context(serve_requests(connection, ENDPOINT, InstanceId(number), handlers, server))
            for number, connection in enumerate(connections)
        ]
        frontend = FakeConnection(bus)
        opened = await stack.enter_async_context(open_client(frontend, ENDPOINT.namespace, client))
        yield Plane(bus, opened, frontend, servers, connections)


async def measure(request: Incoming) -> None:
    request.end(b"%d" % len(request.body))


async def large(request: Incoming) -> None:
    request.end(bytes(1535 * KIB))  # the last chunk and END are in messages of their own


class Held:
    """A handler that waits, and counts who was cancelled."""

    def __init__(self) -> None:
        self.open = 0
        self.cancelled = 0
        self.release = asyncio.Event()

    async def __call__(self, request: Incoming) -> None:
        self.open += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        request.end(b"released")


async def trickle(request: Incoming) -> None:
    """Forty bytes every 10 ms."""
    while True:
        if not request.send_nowait(bytes(40)):
            await request.ready()
        await asyncio.sleep(0.01)


# Uploads


def is_chunk(subject: str, frame: frames.Frame) -> bool:
    return isinstance(frame, frames.Chunk)


@pytest.mark.parametrize("how", ["deadline", "lost chunk", "cancelled", "worker's reconnect", "frontend's reconnect"])
@in_virtual_time
async def test_credit_of_uploads_that_end_early_comes_back(how: str) -> None:
    async with plane({"measure": measure}) as p:
        budget = p.servers[0].free_upload_bytes
        count = 3 if how == "lost chunk" else 10**9
        p.lose(is_chunk, count)
        deadline_s = 1.0 if how == "deadline" else None
        streams = [p.open("measure", bytes(100 * MIB), deadline_s) for _ in range(3)]
        await asyncio.sleep(0.5)
        if how == "worker's reconnect":
            p.workers[0].is_up = False
            await asyncio.sleep(0.1)
            p.workers[0].reconnect()
        elif how == "frontend's reconnect":
            p.frontend.is_up = False
            await asyncio.sleep(0.1)
            p.frontend.reconnect()
        elif how == "cancelled":
            for stream in streams:
                stream.cancel()
        p.lose(is_chunk, 0)
        outcomes = await asyncio.wait_for(asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True), 10)
        assert all(isinstance(outcome, Exception) or outcome == b"%d" % (100 * MIB) for outcome in outcomes)
        await asyncio.sleep(2)
        assert p.servers[0].free_upload_bytes == budget
        assert p.servers[0].open_requests == 0
        assert await asyncio.wait_for(p.open("measure", bytes(2 * MIB)).result(), 5) == b"%d" % (2 * MIB)


@in_virtual_time
async def test_an_upload_whose_last_chunk_is_lost_fails_rather_than_hangs() -> None:
    async with plane({"measure": measure}) as p:
        p.lose(is_chunk)
        stream = p.open("measure", bytes(900 * KIB))
        with pytest.raises(Unavailable, match="got only a part of the request") as lost:
            await asyncio.wait_for(stream.result(), 5)
        assert lost.value.retryable


@in_virtual_time
async def test_an_upload_goes_on_when_its_credit_was_lost() -> None:
    async with plane({"measure": measure}) as p:
        p.lose(lambda subject, frame: isinstance(frame, frames.Credit))
        assert await asyncio.wait_for(p.open("measure", bytes(3 * MIB)).result(), 5) == b"%d" % (3 * MIB)


@in_virtual_time
async def test_an_upload_survives_reconnects_that_lose_nothing_of_it() -> None:
    async with plane({"measure": measure}, server=PlaneLimits(budget_bytes=2 * MIB)) as p:
        stream = p.open("measure", bytes(6 * MIB))
        for connection in (p.frontend, p.workers[0]):
            connection.is_up = False
            connection.reconnect()
        assert await asyncio.wait_for(stream.result(), 5) == b"%d" % (6 * MIB)


@in_virtual_time
async def test_a_credit_that_is_repeated_while_the_rest_of_an_upload_is_on_its_way_harms_nothing() -> None:
    held = Held()
    async with plane({"held": held}) as p:

        def repeat_credit(subject: str, payload: bytes) -> bool:
            if any(isinstance(frame, frames.Credit) and frame.stream for frame in frames.decode(payload)):
                p.bus.is_lost = lambda subject, payload: False
                p.bus.publish(subject, payload, "")
            return False

        p.bus.is_lost = repeat_credit
        stream = p.open("held", bytes(3 * MIB))
        await asyncio.sleep(0.1)
        assert held.open == 1
        held.release.set()
        assert await stream.result() == b"released"


@in_virtual_time
async def test_a_chunk_too_many_ends_a_request_that_runs_already(caplog: pytest.LogCaptureFixture) -> None:
    running: list[Incoming] = []

    async def end_late(request: Incoming) -> None:
        running.append(request)
        await asyncio.sleep(1)
        request.end(b"late")

    async with plane({"late": end_late}) as p:
        stream = p.open("late", b"body")
        await asyncio.sleep(0.1)
        running[0].on_chunk(frames.Chunk(stream.id, 0, memoryview(b"more")))
        with pytest.raises(Unavailable, match="got only a part of the request"):
            await asyncio.wait_for(stream.result(), 5)
        await asyncio.sleep(2)
        assert p.servers[0].open_requests == 0
    assert "has ended already" not in caplog.text


# Responses


@in_virtual_time
async def test_a_response_whose_last_chunk_is_lost_is_no_success() -> None:
    async with plane({"large": large}) as p:
        p.lose(lambda subject, frame: isinstance(frame, frames.Chunk) and frame.index == 1)
        with pytest.raises(InstanceGone, match="lost part of its response"):
            await asyncio.wait_for(p.open("large").result(), 5)


@in_virtual_time
async def test_a_response_of_which_only_the_end_came_is_no_success() -> None:
    async def end_later(request: Incoming) -> None:
        request.send_nowait(bytes(600 * KIB))
        await request.ready()
        await asyncio.sleep(0.1)
        request.end()

    async with plane({"late": end_later}) as p:
        p.lose(is_chunk, 10)
        with pytest.raises(InstanceGone, match="lost part of its response"):
            await asyncio.wait_for(p.open("late").result(), 5)


@in_virtual_time
async def test_a_stream_goes_on_when_its_credit_was_lost() -> None:
    async with plane({"trickle": trickle}) as p:
        p.lose(lambda subject, frame: isinstance(frame, frames.Credit), 3)
        received = 0
        async with p.open("trickle") as stream:
            async with asyncio.timeout(60):
                while received < 2000:
                    received += len(await stream.read())


def publish_as_instance(p: Plane, *messages: frames.Frame) -> None:
    p.bus.publish(f"{p.client.prefix}.0", msgspec.msgpack.encode(messages), "")


@pytest.mark.parametrize("gathered", [1, 200])
@in_virtual_time
async def test_an_instance_that_sends_without_credit_fails_its_stream(gathered: int) -> None:
    async with plane({"held": Held()}) as p, p.open("held", many="") as stream:
        await asyncio.sleep(0.1)
        for number in range(0, 20_000, gathered):
            responses = [memoryview(b"")] * gathered
            publish_as_instance(p, frames.Many(stream.id, number, responses) if gathered > 1 else frames.Data(stream.id, number))
        with pytest.raises(InstanceGone, match="more of its response than it may"):
            await stream.read()


@pytest.mark.parametrize("size", [0, 10_000])
@in_virtual_time
async def test_an_instance_that_sends_parts_of_a_response_without_end_fails_its_stream(size: int) -> None:
    async with plane({"held": Held()}, client=PlaneLimits(max_buffered_bytes=MIB)) as p, p.open("held") as stream:
        await asyncio.sleep(0.1)
        for number in range(10_000):
            publish_as_instance(p, frames.Chunk(stream.id, number, memoryview(bytes(size))))
        with pytest.raises(Overloaded, match="in parts take 1048576 bytes already"):
            await stream.result()
        assert p.client.parts_bytes == 0


@in_virtual_time
async def test_parts_of_responses_count_until_these_are_complete_or_their_callers_leave() -> None:
    async with plane({"held": Held()}, client=PlaneLimits(max_buffered_bytes=MIB)) as p:
        streams = [p.open("held") for _ in range(3)]
        await asyncio.sleep(0.1)
        for stream in streams:
            publish_as_instance(p, frames.Chunk(stream.id, 0, memoryview(bytes(MIB // 2 - 1000))))
        with pytest.raises(Overloaded):
            await streams[2].result()
        publish_as_instance(p, frames.End(streams[0].id, 1, memoryview(b"x")))
        assert len(await streams[0].result()) == MIB // 2 - 1000
        assert MIB // 2 > p.client.parts_bytes > MIB // 2 - 1000
        streams[1].cancel()
        assert p.client.parts_bytes == 0


@pytest.mark.parametrize("retry_after_s", [float("nan"), float("inf"), -1.0, 1e9])
@in_virtual_time
async def test_an_overloaded_instance_that_names_no_time_to_wait_gets_the_default(retry_after_s: float) -> None:
    async with plane({"held": Held()}) as p, p.open("held") as stream:
        await asyncio.sleep(0.1)
        publish_as_instance(p, frames.Error(stream.id, Overloaded.code, "full", True, retry_after_s))
        with pytest.raises(Overloaded) as error:
            await stream.result()
    assert error.value.retry_after_s == Overloaded("full").retry_after_s


@in_virtual_time
async def test_an_error_text_is_cut() -> None:
    async def quote(request: Incoming) -> None:
        raise EngineError("KeyError: " + bytes(request.body).decode())

    async with plane({"quote": quote}) as p:
        with pytest.raises(EngineError, match="KeyError: aaa") as error:
            await p.open("quote", b"a" * 3 * MIB).result()
        assert len(str(error.value)) == PlaneLimits().max_error_chars
        assert p.workers[0].largest < 64 * KIB


@pytest.mark.parametrize("size", [10, 3 * MIB])
@in_virtual_time
async def test_headers_above_the_limit_are_refused(size: int) -> None:
    async with plane({"measure": measure}) as p:
        with pytest.raises(InvalidRequest, match=r"the headers of the request have 20000\d\d bytes; at most 32768 are allowed"):
            await p.open("measure", bytes(size), baggage="v" * 2_000_000).result()
        assert p.frontend.largest == 0
        assert await p.open("measure", bytes(size), baggage="v" * 20_000).result() == b"%d" % size


# Cancelling


@pytest.mark.parametrize("verb", ["trickle", "held"])
@in_virtual_time
async def test_a_cancel_that_is_lost_is_sent_again(verb: str) -> None:
    async with plane({"trickle": trickle, "held": Held()}) as p:
        stream = p.open(verb)
        await asyncio.sleep(0.5)
        p.lose(lambda subject, frame: isinstance(frame, frames.Cancel))
        stream.cancel()
        await asyncio.sleep(3)
        assert p.servers[0].open_requests == 0


def requests_in_memory() -> list[Incoming]:
    return instances_of(Incoming)


@in_virtual_time
async def test_a_request_that_is_cancelled_before_its_handler_begins_keeps_no_memory() -> None:
    earlier = requests_in_memory()  # of other tests, in cycles that are not collected yet
    gc.disable()
    try:
        async with plane({"held": Held()}) as p:
            id_, reply = InstanceId(0), f"{p.client.prefix}.0.1"
            both = [frames.Open(1, "held", {}, -1, 3, 3, 0, memoryview(b"abc")), frames.Cancel(1)]
            p.frontend.publish_nowait(ENDPOINT.rpc_subject(id_), [frames.message_head(2), *map(frames.encode, both)], reply)
            await asyncio.sleep(1)
            assert p.servers[0].open_requests == 0
            assert [one for one in requests_in_memory() if one not in earlier] == []
    finally:
        gc.enable()


@in_virtual_time
async def test_a_stream_that_is_blocked_ends_when_its_caller_died() -> None:
    async with plane({"trickle": trickle}) as p:
        p.open("trickle")
        await asyncio.sleep(10)
        p.frontend.is_up = False
        await asyncio.sleep(4)
        assert p.servers[0].open_requests == 0
        await asyncio.wait_for(p.servers[0].drained(), 1)


@in_virtual_time
async def test_the_requests_of_a_caller_that_hangs_are_cancelled_and_their_credit_comes_back() -> None:
    async with plane({"trickle": trickle, "measure": measure}) as p:
        budget = p.servers[0].free_upload_bytes
        p.lose(is_chunk, 10**9)
        streams = [p.open("trickle"), p.open("measure", bytes(100 * MIB))]
        await asyncio.sleep(1)
        p.bus.is_lost = lambda subject, payload: subject.endswith(".rpc")  # the caller is there and does not speak
        await asyncio.sleep(35)
        assert p.servers[0].open_requests == 0
        assert p.servers[0].free_upload_bytes == budget
        assert all(stream.id for stream in streams)


@in_virtual_time
async def test_a_caller_that_only_waits_keeps_its_request() -> None:
    held = Held()
    async with plane({"held": held}) as p:
        stream = p.open("held")
        await asyncio.sleep(120)
        held.release.set()
        assert await stream.result() == b"released"


# Connections and instances


@in_virtual_time
async def test_a_short_reconnect_of_a_worker_costs_only_what_was_sent_meanwhile() -> None:
    held = Held()
    async with plane({"held": held}) as p:
        before = [p.open("held") for _ in range(5)]
        await asyncio.sleep(0.1)
        p.workers[0].is_up = False
        meanwhile = p.open("held")
        with pytest.raises(InstanceGone, match="is gone"):
            await meanwhile.result()
        await asyncio.sleep(0.6)
        p.workers[0].reconnect()
        await asyncio.sleep(3)
        held.release.set()
        assert [await stream.result() for stream in before] == [b"released"] * 5


@in_virtual_time
async def test_a_short_reconnect_of_a_frontend_costs_no_request() -> None:
    held = Held()
    async with plane({"held": held}) as p:
        streams = [p.open("held") for _ in range(5)]
        await asyncio.sleep(1.9)
        p.frontend.is_up = False
        await asyncio.sleep(0.8)
        p.frontend.reconnect()
        await asyncio.sleep(3)
        held.release.set()
        assert [await stream.result() for stream in streams] == [b"released"] * 5


@in_virtual_time
async def test_a_worker_that_died_fails_its_streams_within_seconds() -> None:
    async with plane({"held": Held()}) as p:
        stream = p.open("held")
        await asyncio.sleep(0.1)
        p.workers[0].is_up = False
        died_at = now()
        with pytest.raises(InstanceGone, match="is gone"):
            await stream.result()
        assert now() - died_at < 2.5


@in_virtual_time
async def test_a_worker_that_does_not_come_back_after_a_restart_of_the_server_fails_its_streams_a_second_later() -> None:
    async with plane({"held": Held()}, workers=2) as p:
        lost, kept = p.open("held", worker=0), p.open("held", worker=1)
        await asyncio.sleep(0.1)
        for connection in (*p.workers, p.frontend):
            connection.is_up = False
        await asyncio.sleep(3)
        p.frontend.reconnect()
        back_at = now()
        await asyncio.sleep(0.9)
        p.workers[1].reconnect()
        with pytest.raises(InstanceGone, match="is gone"):
            await lost.result()
        assert now() - back_at < 1.1
        await asyncio.sleep(5)
        assert p.servers[1].open_requests == 1
        kept.cancel()


@in_virtual_time
async def test_a_link_that_is_silent_for_long_blames_no_instance() -> None:
    held = Held()
    async with plane({"held": held}, workers=3) as p:
        streams = [p.open("held", worker=worker) for worker in range(3)]
        await asyncio.sleep(1)
        p.bus.is_hung = True
        late = p.open("held", worker=1)
        await asyncio.sleep(60)
        p.bus.go_on()
        await asyncio.sleep(3)
        held.release.set()
        assert [await stream.result() for stream in [*streams, late]] == [b"released"] * 4


@in_virtual_time
async def test_an_instance_that_hangs_is_given_up_once_others_respond() -> None:
    held = Held()
    async with plane({"held": held}, workers=3) as p:
        await asyncio.gather(*(p.open("unknown", worker=worker).result() for worker in range(3)), return_exceptions=True)
        hung, living = p.open("held", worker=0), p.open("held", worker=1)
        await asyncio.sleep(0.1)
        began = now()
        p.bus.is_lost = lambda subject, payload: subject == ENDPOINT.rpc_subject(InstanceId(0)) or subject.endswith(".0")
        with pytest.raises(InstanceGone, match="does not respond any more"):
            await hung.result()
        assert 5 < now() - began < 9
        held.release.set()
        assert await living.result() == b"released"


@in_virtual_time
async def test_when_no_instance_responds_none_is_judged_for_three_times_as_long() -> None:
    async with plane({"held": Held()}, workers=3) as p:
        streams = [p.open("held", worker=worker) for worker in range(3)]
        await asyncio.sleep(0.1)
        began = now()
        p.bus.is_lost = lambda subject, payload: True
        with pytest.raises(InstanceGone, match="does not respond any more"):
            await streams[0].result()
        assert 15 < now() - began < 20


@in_virtual_time
async def test_a_frame_of_an_instance_that_was_taken_for_gone_says_that_it_is_back() -> None:
    returned: list[InstanceId] = []
    async with plane({"held": Held()}) as p:
        p.client.on_sign_of_life(returned.append)
        p.workers[0].is_up = False
        with pytest.raises(InstanceGone):
            await p.open("held").result()
        await asyncio.sleep(5)
        assert returned == []
        p.workers[0].reconnect()
        await asyncio.sleep(1)
        assert returned == [InstanceId(0)]


@in_virtual_time
async def test_a_deadline_ends_an_upload_that_gets_no_credit() -> None:
    async with plane({"measure": measure}, server=PlaneLimits(budget_bytes=0)) as p:
        with pytest.raises(DeadlineExceeded):
            await p.open("measure", bytes(3 * MIB), deadline_s=2).result()
        await asyncio.sleep(1)
        assert p.servers[0].open_requests == 0


# Foreign messages


def test_messages_that_cannot_be_read_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    @in_virtual_time
    async def flood() -> None:
        async with plane({"measure": measure}) as p:
            deep = b"\x91" * 100_000
            for garbage in (b"", b"\xff", b"\x91\x93\x00\x01\xa1\xff", deep, b"\x91\x92\x03\xa1\xff"):
                for _ in range(100):
                    p.frontend.publish_nowait(ENDPOINT.rpc_subject(InstanceId(0)), garbage, f"{p.client.prefix}.0.1")
                    p.frontend.publish_nowait(f"{p.client.prefix}.0", garbage)
            p.frontend.publish_nowait(ENDPOINT.rpc_subject(InstanceId(0)), b"\x90", "x")
            await asyncio.sleep(0.1)
            assert await p.open("measure", b"12").result() == b"2"

    flood()
    dropped = [record for record in caplog.records if "was dropped" in record.getMessage()]
    assert len(dropped) == 2
    assert not any(record.exc_info for record in caplog.records)
