"""What refused gRPC calls cost: their messages are not looked at, and nothing of them stays."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dynamo.common.errors import InvalidRequest, Unauthenticated, release
from dynamo.common.security.files import Watched
from dynamo.frontend.api.guard import Accounts, Guard
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.api.rpc.handlers import Context, Handlers, PendingMessage, read_message
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import GrpcOptions, GrpcServerChoice
from dynamo.frontend.security.keys import entry_for, make_key, read_keys
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import SERVERS, open_edge
from tests.support.fakes import tensor_card
from tests.support.memory import resident_bytes

METHOD = f"/{SERVICE}/RepositoryModelLoad"


class Message:
    """Something that a handler holds, and that can be watched."""


class Handler:
    """Refuses every call, deep inside, for its message."""

    def __init__(self) -> None:
        self.read = 0
        self.watched: list[weakref.ref[Message]] = []

    async def __call__(self, request: bytes | PendingMessage, context: Context) -> bytes:
        data = await read_message(request)
        self.read += 1
        held = Message()
        self.watched.append(weakref.ref(held))
        try:
            raise InvalidRequest(f"a message of {len(data)} bytes held by {held!r}")
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


@asynccontextmanager
async def served(handlers: Handlers, server: GrpcServerChoice, *, guarded: bool = False) -> AsyncIterator[grpc.aio.Channel]:
    options = GrpcOptions(port=0, server=server)
    async with (
        serve_grpc(options, {SERVICE: handlers}, guarded=guarded) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        yield channel


async def status(channel: grpc.aio.Channel, data: bytes, method: str = METHOD) -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(data)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("server", SERVERS)
async def test_a_refused_call_keeps_nothing_alive(server: GrpcServerChoice, no_collector: None) -> None:
    handler = Handler()
    handlers = {"RepositoryModelLoad": grpc.unary_unary_rpc_method_handler(handler.__call__)}
    async with served(handlers, server) as channel:
        for _ in range(20):
            assert await status(channel, b"x") is grpc.StatusCode.INVALID_ARGUMENT
        assert handler.read == 20
        assert [ref for ref in handler.watched[:-1] if ref() is not None] == []


@pytest.mark.parametrize("server", SERVERS)
async def test_memory_stays_over_a_thousand_refused_requests(server: GrpcServerChoice, no_collector: None) -> None:
    request = pb.ModelInferRequest(model_name=tensor_card().name, id="a")
    request.inputs.add(name="nothing", datatype="FP32", shape=[65536])
    request.raw_input_contents.append(bytes(256 * 1024))
    data = request.SerializeToString()
    async with open_edge(tensor_card(), server=server) as edge:
        method = f"/{SERVICE}/ModelInfer"
        for _ in range(50):
            assert await status(edge.channel, data, method) is grpc.StatusCode.INVALID_ARGUMENT
        before = resident_bytes()
        for _ in range(1000):
            assert await status(edge.channel, data, method) is grpc.StatusCode.INVALID_ARGUMENT
        assert resident_bytes() - before < 64 * 2**20  # the messages have 250 MiB


@pytest.mark.parametrize("server", SERVERS)
async def test_memory_stays_over_refused_requests_of_a_stream(server: GrpcServerChoice, no_collector: None) -> None:
    request = pb.ModelInferRequest(model_name="unknown", id="a")
    request.raw_input_contents.append(bytes(256 * 1024))
    async with open_edge(tensor_card(), server=server) as edge:
        stream = edge.stream()
        before = resident_bytes()
        for _ in range(400):
            await stream.send(request)
            assert "not found" in (await stream.read()).error_message
        assert resident_bytes() - before < 48 * 2**20  # the messages have 100 MiB
        await stream.rest()


def guard_of(tmp_path: Path) -> Guard:
    path = tmp_path / "keys"
    path.write_text(entry_for(make_key(), "team"))
    return Guard(Accounts(Watched("keys", (path,), lambda: read_keys(path))))


METHODS = ("ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload", "ModelConfig", "TraceSetting", "RepositoryIndex")


@pytest.mark.parametrize("server", SERVERS)
async def test_a_call_without_a_key_does_not_reach_its_handler(server: GrpcServerChoice, tmp_path: Path) -> None:
    handler = Handler()
    handlers = {name: grpc.unary_unary_rpc_method_handler(handler.__call__) for name in METHODS}
    async with served(guarded({SERVICE: handlers}, guard_of(tmp_path))[SERVICE], server, guarded=True) as channel:
        for name in METHODS:
            assert await status(channel, b"x", f"/{SERVICE}/{name}") is grpc.StatusCode.UNAUTHENTICATED
    assert handler.read == 0


async def test_a_call_without_a_key_is_refused_before_its_message_arrives(tmp_path: Path) -> None:
    handlers = {name: grpc.unary_unary_rpc_method_handler(Handler().__call__) for name in METHODS}
    async with served(
        guarded({SERVICE: handlers}, guard_of(tmp_path))[SERVICE], GrpcServerChoice.GRPCIO, guarded=True
    ) as channel:
        for name in METHODS:
            call = channel.stream_unary(f"/{SERVICE}/{name}")()  # sends headers, and no message
            async with asyncio.timeout(5):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_without_a_message_is_refused() -> None:
    handlers = {"ModelConfig": grpc.unary_unary_rpc_method_handler(Handler().__call__)}
    async with served(handlers, GrpcServerChoice.GRPCIO, guarded=True) as channel:
        call = channel.stream_unary(f"/{SERVICE}/ModelConfig")()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await call.details() == "the call has no message"


def test_a_released_error_has_no_ties() -> None:
    held = Message()
    watched = weakref.ref(held)
    kept: list[BaseException] = []

    def fail(message: Message) -> None:
        try:
            try:
                raise ValueError("first")
            except ValueError as error:
                raise InvalidRequest("second") from error
        except InvalidRequest as error:
            raise ExceptionGroup("third", [error, Unauthenticated("fourth")]) from None

    try:
        fail(held)
    except ExceptionGroup as error:
        kept.append(error)
    del held
    assert watched() is not None
    release(kept[0])
    assert watched() is None
    assert str(kept[0].exceptions[0]) == "second"  # type: ignore[attr-defined]


@pytest.mark.parametrize("server", SERVERS)
async def test_streams_that_come_during_a_shutdown_are_unavailable(server: GrpcServerChoice) -> None:
    finish = asyncio.Event()
    entered = asyncio.Event()

    async def streaming(requests: object, context: Context) -> None:
        while isinstance(await context.read(), bytes):
            entered.set()
            await finish.wait()
            await context.write(b"done")

    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(streaming)}
    options = GrpcOptions(port=0, server=server)
    async with (
        serve_grpc(options, {SERVICE: handlers}) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        accepted = method()
        await accepted.write(b"one")
        await entered.wait()
        stopping = asyncio.create_task(running.stop(5))
        codes = set()
        await asyncio.sleep(0.05)  # the shutdown has begun
        for _ in range(20):
            refused = method()
            codes.add(await refused.code())
            await asyncio.sleep(0.01)
        finish.set()
        assert await accepted.read() == b"done"
        await accepted.done_writing()
        assert await accepted.code() is grpc.StatusCode.OK
        while not stopping.done():
            codes.add(await method().code())
            await asyncio.sleep(0.01)
        assert codes == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("server", SERVERS)
async def test_streams_are_unavailable_while_a_shutdown_waits_for_other_calls(server: GrpcServerChoice) -> None:
    finish = asyncio.Event()
    entered = asyncio.Event()

    async def streaming(requests: object, context: Context) -> None:
        await context.read()

    async def slow(request: bytes | PendingMessage, context: Context) -> bytes:
        entered.set()
        await finish.wait()
        return b"done"

    handlers = {
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(streaming),
        "ModelInfer": grpc.unary_unary_rpc_method_handler(slow),
    }
    async with (
        serve_grpc(GrpcOptions(port=0, server=server), {SERVICE: handlers}) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        accepted = asyncio.create_task(status(channel, b"", f"/{SERVICE}/ModelInfer"))
        await entered.wait()
        stopping = asyncio.create_task(running.stop(5))
        await asyncio.sleep(0.05)
        codes = Counter(await asyncio.gather(*(stream_status(channel) for _ in range(300))))
        finish.set()
        assert await accepted is grpc.StatusCode.OK
        await stopping
        # Of a call that ends while its client writes, grpc.aio reports INTERNAL now and then, whatever the server said.
        assert codes[grpc.StatusCode.UNAVAILABLE] >= 285
        assert codes.keys() <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}


async def stream_status(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a stream that sends a request ends."""
    call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
    try:
        await call.write(b"request")
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.InvalidStateError:
        pass
    return await call.code()
