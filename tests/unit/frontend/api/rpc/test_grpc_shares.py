"""What one caller may take of a gRPC port that all share: watches of health, messages that arrive, streams that do nothing."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dynamo.common.errors import Overloaded, RateLimited
from dynamo.common.lifecycle import open_listener
from dynamo.common.security.files import Watched
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import Accounts, Guard
from dynamo.frontend.api.rpc.bounded import bounded
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE
from dynamo.frontend.api.rpc.http2.server import Http2Server
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.api.rpc.watches import PER_CONNECTION, PER_PROCESS, TooManyWatches, Watches
from dynamo.frontend.config import CapacityOptions, GrpcOptions
from dynamo.frontend.security.keys import entry_for, make_key, read_keys
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import Edge, open_edge
from tests.support.fakes import echo_tensor, tensor_card
from tests.support.grpc_operations import bidirectional, unary
from tests.support.http2 import connected, data, fields, headers, message
from tests.support.waiting import WAIT_S, until, until_free

MIB = 2**20
Watch = grpc.aio.UnaryStreamCall[bytes, bytes]

# Watches


def watch(edge: Edge) -> Watch:
    call: Watch = edge.channel.unary_stream(f"/{HEALTH_SERVICE}/Watch")(b"")
    return call


async def test_a_connection_has_a_bound_of_watches_and_those_that_end_make_room() -> None:
    async with open_edge(tensor_card()) as edge:
        watches = [watch(edge) for _ in range(PER_CONNECTION)]
        for each in watches:
            assert isinstance(await each.read(), bytes)
        assert await watch(edge).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches.pop().cancel()
        async with asyncio.timeout(WAIT_S):
            while True:
                another = watch(edge)
                try:
                    assert isinstance(await another.read(), bytes)
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in (another, *watches):
            each.cancel()


def test_a_process_has_a_bound_of_watches() -> None:
    watches = Watches(lambda service: 1, lambda: False)
    with ExitStack() as entered:
        for number in range(PER_PROCESS):
            entered.enter_context(watches.entered(f"{number}"))
        with pytest.raises(TooManyWatches, match="its limit"), watches.entered("another"):
            pass
    with watches.entered("another"):
        pass


async def test_the_status_of_a_service_is_determined_once_for_all_of_its_watches() -> None:
    statuses, determined = {"a": 1, "b": 1}, []

    def status(service: str) -> int:
        determined.append(service)
        return statuses[service]

    watches = Watches(status, lambda: False)
    with ExitStack() as entered:
        of_a = [entered.enter_context(watches.watching("a")) for _ in range(100)]
        of_b = entered.enter_context(watches.watching("b"))
        assert determined == ["a", "b"]
        changes, other = [each.next_change() for each in of_a], of_b.next_change()
        statuses["a"] = 2
        async with asyncio.timeout(WAIT_S):
            for change in changes:
                await change.wait()
        assert [each.status for each in of_a] == [2] * 100
        assert not other.is_set()
        assert determined.count("a") == determined.count("b")


async def test_nothing_is_determined_without_a_watch() -> None:
    determined: list[str] = []

    def status(service: str) -> int:
        determined.append(service)
        return 1

    watches = Watches(status, lambda: False)
    with watches.watching("a"):
        pass
    watches.look_soon()
    with watches.watching("b") as other:
        change = other.next_change()
        determined.clear()
        watches.look_soon()
        await until(lambda: determined)
    assert (set(determined), change.is_set()) == ({"b"}, False)


# Messages that arrive


def test_several_incomplete_messages_of_a_key_leave_half_of_the_rest_to_others() -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=12 * MIB))
    capacity.hold_waiting("a", 4 * MIB, 0)
    with pytest.raises(RateLimited, match="key 'a'"):
        capacity.hold_waiting("a", 5 * MIB, 0)
    capacity.hold_waiting("b", 6 * MIB, 0)
    assert capacity.buffered_bytes == 10 * MIB
    capacity.waiting_over("a", 4 * MIB)
    capacity.hold_waiting("a", 2 * MIB, 0)
    with pytest.raises(Overloaded):
        capacity.hold_waiting("c", 1, 0)


def test_one_incomplete_message_of_a_key_may_take_what_is_left() -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=4 * MIB))
    for held in range(4):
        capacity.hold_waiting("a", MIB, held * MIB)
    assert capacity.buffered_bytes == 4 * MIB


def to(name: str, key: str) -> list[tuple[str, str]]:
    return fields(f"/test.Keys/{name}", ("x-api-key", key))


@asynccontextmanager
async def keyed(tmp_path: Path, capacity: Capacity, limits: str = "") -> AsyncIterator[tuple[Http2Server, list[str]]]:
    """A server that requires keys, and two keys."""

    async def say(request: bytes | PendingMessage, context: Context) -> bytes:
        return await read_message(request)

    async def grow(request: bytes | PendingMessage, context: Context) -> bytes:
        return bytes(int(await read_message(request)))

    async def read(unused: object, context: Context) -> None:
        while isinstance(await context.read(), bytes | memoryview):
            pass

    path, keys = tmp_path / "keys", [make_key(), make_key()]
    path.write_text("".join(entry_for(key, name) + limits for key, name in zip(keys, ("a", "b"), strict=True)))
    guard = Guard(Accounts(Watched("keys", (path,), lambda: read_keys(path))))
    operations = [unary("/test.Keys/Say", say), unary("/test.Keys/Grow", grow), bidirectional("/test.Keys/Read", read)]
    server = Http2Server(GrpcOptions(port=0), guarded(bounded(operations, capacity), guard), capacity, guarded=True)
    await server.listen(open_listener("127.0.0.1", 0, flag="--grpc-port"), None)
    try:
        yield server, keys
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize("method", ["Say", "Read"])
async def test_messages_of_a_key_that_arrive_leave_room_for_another_key(method: str, tmp_path: Path) -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=4 * MIB))
    async with keyed(tmp_path, capacity) as (server, (key, other)), connected(server.port) as client:
        for stream in (1, 3, 5, 7):
            client.send(headers(stream, pairs=to(method, key)), data(stream, message(b"", size=3 * MIB), ends=False))
        await until(lambda: len(server.calls) == 4)
        for _ in range(12):  # rounds that the client's windows allow before it reads
            client.send(*(data(stream, bytes(5000), ends=False) for stream in (1, 3, 5, 7)))
        await until(lambda: capacity.buffered_bytes >= 4 * 60_000)
        for _ in range(288):
            client.send(*(data(stream, bytes(10_000), ends=False) for stream in (1, 3, 5, 7)))
        assert await client.status(7) == "8"
        async with connected(server.port) as another:
            another.send(headers(1, pairs=to(method, other)), data(1, message(bytes(60_000))))
            assert await another.status(1) == "0"
    await until_free(capacity)


async def test_messages_of_a_key_that_are_decompressed_leave_room_for_another_key(tmp_path: Path) -> None:
    capacity, bomb = Capacity(CapacityOptions(max_buffered_bytes=12 * MIB)), gzip.compress(bytes(4 * MIB))
    async with keyed(tmp_path, capacity) as (server, (key, _)):
        call = headers(1, pairs=[*to("Read", key), ("grpc-encoding", "gzip")]) + data(1, message(bomb, flag=1))

        async def status() -> str:
            async with connected(server.port) as client:
                client.send(call)
                return await client.status(1)

        statuses = await asyncio.gather(*(status() for _ in range(4)))
        assert sorted(set(statuses)) == ["0", "8"]
    await until_free(capacity)


async def test_responses_that_a_key_does_not_read_leave_room_for_another_key(tmp_path: Path) -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=8 * MIB))
    async with keyed(tmp_path, capacity) as (server, (key, other)), connected(server.port) as client:
        for stream in (1, 3, 5):
            client.send(headers(stream, pairs=to("Grow", key)), data(stream, message(b"%d" % (2 * MIB))))
        assert await client.status(5) == "8"
        assert capacity.buffered_bytes == pytest.approx(4 * MIB, rel=0.1)
        async with connected(server.port) as another:
            another.send(headers(1, pairs=to("Say", other)), data(1, message(bytes(60_000))))
            assert await another.status(1) == "0"
    await until_free(capacity)


async def test_a_message_that_arrives_takes_one_of_the_requests_of_its_key(tmp_path: Path) -> None:
    capacity, limits = Capacity(), "  concurrent_requests: 1\n"
    async with keyed(tmp_path, capacity, limits) as (server, (key, other)), connected(server.port) as client:
        client.send(headers(1, pairs=to("Say", key)), data(1, message(bytes(10), size=10_000), ends=False))
        await until(lambda: capacity.requests == 1)
        client.send(headers(3, pairs=to("Say", key)), data(3, message(bytes(10), size=10_000), ends=False))
        assert await client.status(3) == "8"
        client.send(headers(5, pairs=to("Say", other)), data(5, message(b"x")))
        assert await client.status(5) == "0"
        client.send(data(1, bytes(9990)))
        assert await client.status(1) == "0"
        client.send(headers(7, pairs=to("Say", key)), data(7, message(b"x")))
        assert await client.status(7) == "0"


# Streams


async def test_a_key_has_as_many_streams_as_it_may_have_requests(tmp_path: Path) -> None:
    capacity, limits = Capacity(), "  concurrent_requests: 2\n"
    async with keyed(tmp_path, capacity, limits) as (server, (key, other)), connected(server.port) as client:
        client.send(headers(1, pairs=to("Read", key)), headers(3, pairs=to("Read", key)))
        await until(lambda: capacity.requests == 2)
        client.send(headers(5, pairs=to("Read", key)))
        assert await client.status(5) == "8"
        client.send(headers(7, pairs=to("Read", other)), data(7, message(b"x")), data(1, message(b"x")))
        assert await client.status(7) == "0"
        await until(lambda: capacity.requests == 1)
        client.send(headers(9, pairs=to("Read", key)), data(9, message(b"x")))
        assert await client.status(9) == "0"


async def test_streams_of_a_key_without_limits_leave_half_of_the_rest_to_others(tmp_path: Path) -> None:
    capacity = Capacity(CapacityOptions(max_concurrent_requests=8))
    async with keyed(tmp_path, capacity) as (server, (key, other)), connected(server.port) as client:
        client.send(*(headers(stream, pairs=to("Read", key)) for stream in (1, 3, 5, 7)))
        await until(lambda: capacity.requests == 4)
        client.send(headers(9, pairs=to("Read", key)), headers(11, pairs=to("Read", other)), data(11, message(b"x")))
        assert await client.status(9) == "8"
        assert await client.status(11) == "0"


async def test_a_stream_that_is_idle_ends_and_one_with_a_request_goes_on() -> None:
    request = pb.ModelInferRequest(model_name=tensor_card().name, id="a")
    request.inputs.add(name="x", datatype="INT32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    async with open_edge(tensor_card(), options=GrpcOptions(stream_idle_timeout_s=1)) as edge:
        edge.client.respond = lambda stream: None
        busy, idle = edge.stream(), edge.stream()
        await busy.send(request)
        held = await edge.client.next_stream()
        assert await idle.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await idle.call.details() == "the stream had no request for 1 s"
        echo_tensor(held)
        assert not (await busy.read()).error_message
        assert await busy.rest() == []
        await until_free(edge.capacity)
