"""What refused gRPC calls cost: their messages are not looked at, and nothing of them stays."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter

import grpc
import grpc.aio

from dynamo.common.errors import InvalidRequest, Unauthenticated, release
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.handlers import PendingMessage
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import GrpcOptions
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import open_edge
from tests.support.fakes import tensor_card
from tests.support.grpc_operations import bidirectional, unary
from tests.support.memory import resident_bytes
from tests.support.waiting import expiring


class Message:
    """Something that a handler holds, and that can be watched."""


async def status(channel: grpc.aio.Channel, data: bytes, method: str) -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(data)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_memory_stays_over_a_thousand_refused_requests(no_collector: None) -> None:
    request = pb.ModelInferRequest(model_name=tensor_card().name, id="a")
    request.inputs.add(name="nothing", datatype="FP32", shape=[65536])
    request.raw_input_contents.append(bytes(256 * 1024))
    data = request.SerializeToString()
    async with open_edge(tensor_card()) as edge:
        method = f"/{SERVICE}/ModelInfer"
        for _ in range(50):
            assert await status(edge.channel, data, method) is grpc.StatusCode.INVALID_ARGUMENT
        before = resident_bytes()
        for _ in range(1000):
            assert await status(edge.channel, data, method) is grpc.StatusCode.INVALID_ARGUMENT
        assert resident_bytes() - before < 64 * 2**20  # the messages have 250 MiB


async def test_memory_stays_over_refused_requests_of_a_stream(no_collector: None) -> None:
    request = pb.ModelInferRequest(model_name="unknown", id="a")
    request.raw_input_contents.append(bytes(256 * 1024))
    async with open_edge(tensor_card()) as edge:
        stream = edge.stream()
        before = resident_bytes()
        for _ in range(400):
            await stream.send(request)
            assert "not found" in (await stream.read()).error_message
        assert resident_bytes() - before < 48 * 2**20  # the messages have 100 MiB
        await stream.rest()


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


async def test_streams_are_unavailable_while_a_shutdown_waits_for_other_calls() -> None:
    finish = asyncio.Event()
    entered = asyncio.Event()

    async def streaming(requests: object, context: Context) -> None:
        await context.read()

    async def slow(request: bytes | PendingMessage, context: Context) -> bytes:
        entered.set()
        await finish.wait()
        return b"done"

    operations = [bidirectional(f"/{SERVICE}/ModelStreamInfer", streaming), unary(f"/{SERVICE}/ModelInfer", slow)]
    async with (
        serve_grpc(GrpcOptions(port=0), operations) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        accepted = asyncio.create_task(status(channel, b"", f"/{SERVICE}/ModelInfer"))
        await entered.wait()
        stopping = asyncio.create_task(running.stop(5))
        await asyncio.sleep(expiring(0.05))
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
