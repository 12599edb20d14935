"""The request plane over a real nats-server: both sides in this process, on connections of their own."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo.common.errors import (
    Code,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InstanceGone,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ShuttingDown,
    Unavailable,
    Unsupported,
)
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.limits import KIB, MIB, PlaneLimits
from dynamo.common.messaging.request_plane.outbox import FRAMES
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import NatsOptions
from tests.support.servers import NatsServer, start_nats
from tests.support.waiting import WAIT_S, expiring, until

LIMITS = PlaneLimits()
"""Production's."""
PROBING = replace(LIMITS, beat_s=0.05, probe_after_s=0.2)
"""Instances are soon probed, and have production's time to respond."""
QUICK = replace(PROBING, gone_after_s=0.5)
"""For instances that are gone: one that lives may be taken for gone where the machine is busy."""


class Plane:
    """A client and an instance that serves `handlers`."""

    def __init__(
        self,
        client: RequestClient,
        server: RequestServer,
        connection: Connection,
        workers_connection: Connection,
        instance: InstanceId,
        subject: str,
    ) -> None:
        self.client = client
        self.server = server
        self.connection = connection
        self.workers_connection = workers_connection
        self.instance = instance
        self.subject = subject

    def open(self, verb: str, body: bytes = b"", deadline_s: float | None = None) -> RequestStream:
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        return self.client.open(self.instance, self.subject, verb, body, deadline=deadline)


@asynccontextmanager
async def plane(
    url: str, handlers: Mapping[str, Handler], *, client: PlaneLimits = LIMITS, server: PlaneLimits = LIMITS
) -> AsyncIterator[Plane]:
    endpoint, instance = Endpoint(namespace=f"t{new_instance_id():x}"), new_instance_id()
    config = NatsOptions(servers=(url,), reconnect_wait_s=0.05)
    async with AsyncExitStack() as stack:
        theirs = await stack.enter_async_context(connect_nats(config, "worker"))
        ours = await stack.enter_async_context(connect_nats(config, "frontend"))
        serving = await stack.enter_async_context(serve_requests(theirs, endpoint, instance, handlers, server))
        calling = await stack.enter_async_context(open_client(ours, endpoint.namespace, client))
        yield Plane(calling, serving, ours, theirs, instance, endpoint.rpc_subject(instance))


async def echo(request: Incoming) -> None:
    request.end(request.body)


async def count_to_ten(request: Incoming) -> None:
    for number in range(10):
        request.send_nowait(bytes([number]))
    request.end(b"counted")


class Held:
    """A handler that waits to be let go, and tells what became of it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.requests: list[Incoming] = []

    async def __call__(self, request: Incoming) -> None:
        self.requests.append(request)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        request.end(b"released")


async def read_all(stream: RequestStream) -> list[bytes]:
    responses: list[bytes] = []
    async with stream:
        while some := await stream.read():
            responses += map(bytes, some)
    return responses


@pytest.mark.parametrize("size", [0, 1, 5000, 512 * KIB, 512 * KIB + 1, MIB, 3 * MIB + 17, 64 * MIB])
async def test_a_body_of_any_size_comes_back_unchanged(nats_server: NatsServer, size: int) -> None:
    body = os.urandom(size)
    async with plane(nats_server.url, {"echo": echo}) as p:
        assert await p.open("echo", body).result() == body
        assert p.client.open_streams == p.server.open_requests == 0


async def test_answers_come_in_order_and_then_the_trailer(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"count": count_to_ten}) as p:
        stream = p.open("count")
        assert await read_all(stream) == [bytes([number]) for number in range(10)]
        assert stream.trailer == b"counted"
        assert stream.started


async def test_requests_of_one_turn_share_messages(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"echo": echo}) as p:
        await p.open("echo").result()
        streams = [p.open("echo", b"%d" % number) for number in range(51)]
        assert [await stream.result() for stream in streams] == [b"%d" % number for number in range(51)]
        sizes = list(Counter(stream.batch for stream in streams).values())
        assert sizes == [1, FRAMES, 2 * FRAMES, 4 * FRAMES, 22], (
            "the first finds no other request, and the last wait for the end of the turn"
        )


async def test_many_large_requests_at_once_all_pass(nats_server: NatsServer) -> None:
    body = os.urandom(MIB)
    async with plane(nats_server.url, {"echo": echo}, client=PlaneLimits(), server=PlaneLimits()) as p:
        responses = await asyncio.gather(*[p.open("echo", body).result() for _ in range(64)])
        assert all(response == body for response in responses)
        assert p.client.credits.lent_bytes == p.server.uploads.lent_bytes == 0


async def test_a_caller_that_does_not_read_stops_only_its_own_stream(nats_server: NatsServer) -> None:
    sent = 0

    async def flood(request: Incoming) -> None:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            if not request.send_nowait(bytes(10 * KIB)):
                await request.ready()

    async with plane(nats_server.url, {"flood": flood, "echo": echo}) as p:
        slow = p.open("flood")
        for _ in range(20):
            await p.open("echo", b"x").result()
        assert sent <= 3
        assert len(await read_all(slow)) == 1000


async def test_a_stream_whose_reader_keeps_up_seldom_waits_for_credit(nats_server: NatsServer) -> None:
    waits = 0

    async def flood(request: Incoming) -> None:
        nonlocal waits
        for _ in range(400):
            if not request.send_nowait(bytes(10 * KIB)):
                waits += 1
                await request.ready()

    async with plane(nats_server.url, {"flood": flood}, client=PlaneLimits(), server=PlaneLimits()) as p:
        assert len(await read_all(p.open("flood"))) == 400
        assert waits <= 20, "a MiB of credit is enough for a hundred responses"


async def test_responses_in_pieces_wait_for_their_reader_as_well(nats_server: NatsServer) -> None:
    sent = 0

    async def flood(request: Incoming) -> None:
        nonlocal sent
        for _ in range(100):
            sent += 1
            if not request.send_nowait(bytes(48 * KIB)):  # the second one exceeds what is left of the window
                await request.ready()

    limits = PlaneLimits(window_bytes=64 * KIB)
    async with plane(nats_server.url, {"flood": flood, "echo": echo}, client=limits) as p:
        slow = p.open("flood")
        for _ in range(50):
            await p.open("echo", b"x").result()
        assert sent <= 3
        assert [len(response) for response in await read_all(slow)] == [48 * KIB] * 100


async def test_cancelling_reaches_the_handler(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        stream = p.open("held")
        await held.started.wait()
        stream.cancel()
        await asyncio.wait_for(held.cancelled.wait(), 120)
        await asyncio.wait_for(p.server.drained(), 120)


async def test_a_deadline_ends_the_request_on_both_sides(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        stream = p.open("held", deadline_s=1.5)  # time enough to arrive on a busy machine: what arrives late is not run
        await asyncio.wait_for(held.started.wait(), 120)
        with pytest.raises(DeadlineExceeded):
            await stream.result()
        await asyncio.wait_for(held.cancelled.wait(), 120)


async def test_a_request_that_is_late_already_is_refused_and_not_run(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        with pytest.raises(DeadlineExceeded):
            await p.open("held", deadline_s=-1).result()
        await p.server.drained()
        assert not held.started.is_set()


async def raise_invalid(request: Incoming) -> None:
    raise InvalidRequest("no such colour", param="colour")


async def raise_busy(request: Incoming) -> None:
    raise Overloaded("come back later", retry_after_s=7.5)


async def raise_unforeseen(request: Incoming) -> None:
    raise ZeroDivisionError("secret detail")


async def raise_midway(request: Incoming) -> None:
    request.send_nowait(b"first")
    raise EngineError("out of memory")


async def test_errors_keep_their_class_and_words(nats_server: NatsServer) -> None:
    handlers = {"invalid": raise_invalid, "busy": raise_busy, "unforeseen": raise_unforeseen}
    async with plane(nats_server.url, handlers) as p:
        with pytest.raises(InvalidRequest, match="no such colour") as refused:
            await p.open("invalid").result()
        assert refused.value.param == "colour"
        with pytest.raises(Overloaded) as busy:
            await p.open("busy").result()
        assert busy.value.retryable
        assert busy.value.retry_after_s == 7.5
        with pytest.raises(DynamoError) as unforeseen:
            await p.open("unforeseen").result()
        assert unforeseen.value.code is Code.INTERNAL
        assert "secret" not in str(unforeseen.value)
        with pytest.raises(Unsupported, match="verb 'dance'"):
            await p.open("dance").result()


async def test_what_came_before_an_error_is_delivered_first(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"midway": raise_midway}) as p:
        stream = p.open("midway")
        assert await stream.read() == [b"first"]
        with pytest.raises(EngineError, match="out of memory"):
            await stream.read()


async def test_several_answers_to_a_unary_request_are_an_error(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"count": count_to_ten}) as p:
        with pytest.raises(EngineError, match="several responses"):
            await p.open("count").result()


async def test_a_missing_instance_is_noticed_at_once(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {}, client=PlaneLimits(probe_after_s=600)) as p:
        unknown = new_instance_id()
        stream = p.client.open(unknown, "dynamo.nothing.here.rpc", "echo", b"")
        with pytest.raises(InstanceGone) as gone:
            await asyncio.wait_for(stream.result(), 120)
        assert gone.value.instance == unknown
        assert not gone.value.was_held
        assert not stream.started


async def test_requests_under_way_fail_when_their_instance_vanishes(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        stream = p.open("held")
        await held.started.wait()
        await p.workers_connection.close()
        with pytest.raises(InstanceGone) as gone:
            await asyncio.wait_for(stream.result(), 120)
        assert gone.value.was_held


async def test_an_instance_that_hangs_is_given_up(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {}, client=QUICK) as p:
        hung = new_instance_id()
        await p.workers_connection.subscribe("dynamo.hung.rpc", lambda subject, reply, payload, no_responders: None)
        stream = p.client.open(hung, "dynamo.hung.rpc", "held", b"")
        with pytest.raises(InstanceGone, match="does not respond any more") as gone:
            await asyncio.wait_for(stream.result(), 120)
        assert gone.value.was_held


async def test_an_instance_that_was_given_up_gives_a_sign_of_life_by_its_next_frame(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {}, client=QUICK) as p:
        hung, other = new_instance_id(), new_instance_id()
        await p.workers_connection.subscribe("dynamo.hung.rpc", lambda subject, reply, payload, no_responders: None)
        alive: asyncio.Queue[InstanceId] = asyncio.Queue()
        p.client.on_sign_of_life(alive.put_nowait)
        with pytest.raises(InstanceGone):
            await asyncio.wait_for(p.client.open(hung, "dynamo.hung.rpc", "held", b"").result(), 120)
        for subject in ("garbage", f"{other:x}", f"{hung:x}", f"{hung:x}"):
            beat = frames.message_head(1) + frames.encode(frames.Beat([1]))
            p.workers_connection.publish_nowait(f"{p.client.prefix}.{subject}", beat)
        assert await asyncio.wait_for(alive.get(), 120) == hung
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(alive.get(), expiring(0.1))


async def test_a_beat_that_names_very_many_streams_has_few_of_them_cancelled(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {}, client=QUICK) as p:
        cancelled: list[int] = []

        def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            cancelled.extend(frame.stream for frame in frames.decode(payload) if isinstance(frame, frames.Cancel))

        forger = new_instance_id()
        await p.workers_connection.subscribe("dynamo.forger.rpc", on_message)
        stream = p.client.open(forger, "dynamo.forger.rpc", "held", b"")
        beat = frames.message_head(3) + b"".join(
            frames.encode(frames.Beat([stream.id, *range(begin, begin + 40_000)])) for begin in (10**6, 2 * 10**6, 3 * 10**6)
        )
        p.workers_connection.publish_nowait(f"{p.client.prefix}.{forger:x}", beat)
        await until(lambda: len(cancelled) > 0)
        assert len(cancelled) <= 1000
        stream.cancel()


async def test_a_silent_but_living_request_is_waited_for(nats_server: NatsServer) -> None:
    held, limits = Held(), replace(PROBING, gone_after_s=2.0)
    async with plane(nats_server.url, {"held": held}, client=limits, server=limits) as p:
        stream = p.open("held")
        reading = asyncio.ensure_future(read_all(stream))
        done, _ = await asyncio.wait([reading], timeout=expiring(2 * limits.gone_after_s))
        assert not done
        held.release.set()
        assert await reading == []
        assert stream.trailer == b"released"


async def test_asking_after_a_silent_request_harms_no_younger_one(nats_server: NatsServer) -> None:
    held = Held()
    silent = replace(PROBING, beat_s=60)
    async with plane(nats_server.url, {"held": held}, client=PROBING, server=silent) as p:
        streams = [p.open("held")]
        await held.started.wait()
        questions: list[frames.Known] = []

        def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            questions.extend(frame for frame in frames.decode(payload) if isinstance(frame, frames.Known))

        await p.workers_connection.subscribe(f"{p.client.prefix}.>", on_message)
        async with asyncio.timeout(120):
            while len(questions) < 3:  # each question names the streams that are old enough, and not the newer ones
                streams.append(p.open("held"))
                await asyncio.sleep(PROBING.probe_after_s / 10)
        assert any(len(frame.streams) < len(streams) - 1 for frame in questions)
        held.release.set()
        assert [bytes(await stream.result()) for stream in streams] == [b"released"] * len(streams)


async def test_a_lost_answer_is_noticed_by_its_gap(nats_server: NatsServer) -> None:
    async def send_first(request: Incoming) -> None:
        request.send_nowait(b"0")
        await asyncio.Event().wait()

    async with plane(nats_server.url, {"send": send_first}) as p:
        stream = p.open("send")
        assert await stream.read() == [b"0"]
        third = frames.message_head(1) + frames.encode(frames.Data(stream.id, 2, memoryview(b"2")))
        p.workers_connection.publish_nowait(f"{p.client.prefix}.{p.instance:x}", third)
        with pytest.raises(InstanceGone, match="lost part"):
            await read_all(stream)


async def test_an_instance_that_forgot_a_request_is_found_out(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        stream = p.open("held")
        await held.started.wait()
        for request in held.requests:
            request.stop()
        with pytest.raises(InstanceGone, match="does not know"):
            await asyncio.wait_for(stream.result(), 120)


async def test_the_requests_of_a_caller_that_is_gone_are_cancelled(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}) as p:
        p.open("held")
        await held.started.wait()
        await p.connection.close()
        await asyncio.wait_for(held.cancelled.wait(), 120)


async def test_a_draining_instance_refuses_and_finishes(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held, "echo": echo}) as p:
        stream = p.open("held")
        await held.started.wait()
        p.server.refuse_new()
        with pytest.raises(Unavailable) as refusal:
            await p.open("echo").result()
        assert refusal.value.retryable
        assert str(refusal.value) == str(ShuttingDown("the worker"))
        held.release.set()
        assert await stream.result() == b"released"
        await asyncio.wait_for(p.server.drained(), 120)


async def test_too_many_open_requests_are_refused_as_overload(nats_server: NatsServer) -> None:
    held = Held()
    async with plane(nats_server.url, {"held": held}, server=PlaneLimits(max_open_requests=3)) as p:
        streams = [p.open("held") for _ in range(5)]
        for refused in streams[3:]:
            with pytest.raises(Overloaded, match="3 requests open"):
                await refused.result()
        held.release.set()
        assert [await stream.result() for stream in streams[:3]] == [b"released"] * 3


async def test_bodies_above_the_limit_are_refused_on_either_side(nats_server: NatsServer) -> None:
    small = PlaneLimits(max_body_bytes=100 * KIB)
    async with plane(nats_server.url, {"echo": echo}, client=small) as p:
        with pytest.raises(PayloadTooLarge, match="at most 102400"):
            p.open("echo", bytes(101 * KIB))
    async with plane(nats_server.url, {"echo": echo}, server=small) as p:
        with pytest.raises(PayloadTooLarge, match="at most 102400"):
            await p.open("echo", bytes(101 * KIB)).result()


async def test_garbage_on_the_subjects_harms_no_request(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"echo": echo}) as p:
        for garbage in (b"", b"\xff" * 100, os.urandom(1000), b"\x91\x91\x91"):
            p.connection.publish_nowait(p.subject, garbage, f"{p.client.prefix}.{p.instance:x}.1")
            p.connection.publish_nowait(f"{p.client.prefix}.{p.instance:x}", garbage)
        p.connection.publish_nowait(p.subject, frames.message_head(1) + frames.encode(frames.Cancel(5)))
        assert await p.open("echo", b"still here").result() == b"still here"


async def test_small_payload_servers_are_respected(tmp_path: Path) -> None:
    async with start_nats(tmp_path, max_payload_bytes=64 * KIB) as server, plane(server.url, {"echo": echo}) as p:
        body = os.urandom(MIB)
        assert await p.open("echo", body).result() == body


async def test_requests_wait_for_the_connection_and_are_then_answered(tmp_path: Path) -> None:
    async with start_nats(tmp_path) as server, plane(server.url, {"echo": echo}) as p:
        await p.open("echo").result()
        await server.stop()
        await asyncio.wait_for(p.connection.lost(), 120)
        waiting = p.open("echo", b"patient", deadline_s=WAIT_S)
        too_late = p.open("echo", b"hasty", deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await too_late.result()
        await server.restart()
        try:
            response = await asyncio.wait_for(waiting.result(), 120)
        except InstanceGone:  # we were back before the instance was: `dispatcher` asks again inside the grace
            while True:
                try:
                    response = await p.open("echo", b"patient", deadline_s=WAIT_S).result()
                    break
                except InstanceGone:
                    await asyncio.sleep(0.02)
        assert response == b"patient"


async def test_a_stream_survives_a_restart_of_the_server_or_fails_retryably(tmp_path: Path) -> None:
    held = Held()
    async with start_nats(tmp_path) as server, plane(server.url, {"held": held}) as p:
        stream = p.open("held")
        await held.started.wait()
        await server.stop()
        await server.restart()
        await asyncio.wait_for(p.connection.connected(), 120)
        await asyncio.wait_for(p.workers_connection.connected(), 120)
        held.release.set()
        try:
            assert await asyncio.wait_for(stream.result(), 120) == b"released"
        except Unavailable as error:
            assert error.retryable


async def test_many_streams_under_a_restart_all_end(tmp_path: Path) -> None:
    async def trickle(request: Incoming) -> None:
        for number in range(200):
            if not request.send_nowait(b"%d" % number):
                await request.ready()
            await asyncio.sleep(0.005)
        request.end(b"all")

    async with start_nats(tmp_path) as server, plane(server.url, {"trickle": trickle}) as p:
        streams = [p.open("trickle", deadline_s=WAIT_S) for _ in range(50)]
        outcomes = [asyncio.ensure_future(read_all(stream)) for stream in streams]
        first = p.open("trickle")
        await first.read()
        await server.stop()
        await server.restart()
        results = await asyncio.wait_for(asyncio.gather(*outcomes, return_exceptions=True), 120)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, Unavailable)
            else:
                assert result == [b"%d" % number for number in range(200)]


async def test_a_connection_that_was_closed_refuses_subscriptions(nats_server: NatsServer) -> None:
    async with connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as connection:
        pass
    with pytest.raises(Unavailable, match="cannot be subscribed to"):
        await connection.subscribe("x", lambda subject, reply, payload, no_responders: None)


async def raise_echo(request: Incoming) -> None:
    raise EngineError("KeyError: " + bytes(request.body).decode())


async def test_nothing_that_a_request_makes_long_ends_the_connection(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"raise": raise_echo, "echo": echo}) as p:
        with pytest.raises(EngineError, match="KeyError: aaa"):
            await p.open("raise", b"a" * 2 * MIB).result()
        headers = {"baggage": "v" * 2_000_000}
        with pytest.raises(InvalidRequest, match="at most 32768 are allowed"):
            await p.client.open(p.instance, p.subject, "echo", b"", headers=headers).result()
        assert not p.connection.publish_nowait("dynamo.somewhere", bytes(p.connection.max_payload + 1))
        assert await p.open("echo", b"still here").result() == b"still here"
        assert p.connection.reconnected_at == p.workers_connection.reconnected_at == float("-inf")


async def test_uploads_that_miss_their_deadline_leave_no_credit_lent(nats_server: NatsServer) -> None:
    async with plane(nats_server.url, {"echo": echo}, client=PlaneLimits(), server=PlaneLimits()) as p:
        body = bytes(16 * MIB)
        streams = [p.open("echo", body, deadline_s=0.1) for _ in range(24)]
        outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        assert any(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
        async with asyncio.timeout(120):
            while p.server.open_requests or p.server.uploads.lent_bytes:
                await asyncio.sleep(0.05)
        assert len(await p.open("echo", bytes(2 * MIB)).result()) == 2 * MIB
