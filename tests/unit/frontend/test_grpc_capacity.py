"""gRPC calls count, with all other requests, against the capacity of the process."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from dynamo.common.errors import Overloaded
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.config import CapacityOptions, GrpcServerChoice
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import SERVERS, Edge, open_edge
from tests.support.fakes import echo_tensor, tensor_card
from tests.support.waiting import until, until_free

MIB = 2**20
pytestmark = pytest.mark.parametrize("server", SERVERS)


def request(size: int = 8) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=tensor_card().name, id="a")
    message.inputs.add(name="x", datatype="INT32", shape=[size // 4])
    message.raw_input_contents.append(bytes(size))
    return message


async def refused(edge: Edge, method: str, message: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await edge.call(method, message)
    return failure.value


async def test_calls_beyond_the_capacity_are_unavailable_until_others_end(server: GrpcServerChoice) -> None:
    async with open_edge(tensor_card(), server=server, capacity=CapacityOptions(max_concurrent_requests=2)) as edge:
        running = [asyncio.create_task(edge.infer(request())) for _ in range(2)]
        streams = await edge.client.opened_streams(2)
        for method in ("ModelInfer", "ModelMetadata", "ServerMetadata"):
            error = await refused(edge, method, request() if method == "ModelInfer" else b"")
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "the server is processing 2 requests, which is its limit"
            assert dict(error.trailing_metadata() or ())["retry-after"] == "1"
        assert pb.ServerLiveResponse.FromString(await edge.call("ServerLive", b"")).live
        for stream in streams:
            echo_tensor(stream)
        await asyncio.gather(*running)
        await until_free(edge.capacity)
        edge.client.respond = echo_tensor
        await edge.infer(request())
        await until_free(edge.capacity)


async def test_messages_beyond_the_capacity_are_unavailable_and_give_their_bytes_back(server: GrpcServerChoice) -> None:
    async with open_edge(tensor_card(), server=server, capacity=CapacityOptions(max_buffered_bytes=2 * MIB)) as edge:
        edge.client.respond = echo_tensor
        error = await refused(edge, "ModelInfer", request(3 * MIB))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata() or ())["retry-after"] == "1"
        await until_free(edge.capacity)
        edge.client.respond = lambda stream: None
        running = asyncio.create_task(edge.infer(request(MIB)))
        await edge.client.next_stream()
        assert edge.capacity.buffered_bytes >= MIB
        assert (await refused(edge, "ModelInfer", request(MIB))).code() is grpc.StatusCode.UNAVAILABLE
        running.cancel()
        await until_free(edge.capacity)


async def test_each_request_within_a_stream_counts_and_fails_alone(
    server: GrpcServerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_edge(tensor_card(), server=server, capacity=CapacityOptions(max_concurrent_requests=3)) as edge:
        refused = asyncio.Event()
        enter = edge.capacity.enter

        def enter_or_tell() -> Occupancy:
            try:
                return enter()
            except Overloaded:
                refused.set()
                raise

        monkeypatch.setattr(edge.capacity, "enter", enter_or_tell)
        stream = edge.stream()
        await stream.send(request(), request())
        first, second = await edge.client.opened_streams(2)
        await until(lambda: edge.capacity.requests == 3, 5.0)
        await stream.send(request())
        async with asyncio.timeout(5.0):
            await refused.wait()
        echo_tensor(first)
        assert not (await stream.read()).error_message
        echo_tensor(second)
        assert not (await stream.read()).error_message
        assert (await stream.read()).error_message == "the server is processing 3 requests, which is its limit"
        edge.client.respond = echo_tensor
        await stream.send(request())
        assert not (await stream.read()).error_message
        assert await stream.rest() == []
        await until_free(edge.capacity)


async def test_a_stream_that_its_client_cancels_gives_everything_back(server: GrpcServerChoice) -> None:
    async with open_edge(tensor_card(), server=server) as edge:
        stream = edge.stream()
        await stream.send(*(request(MIB) for _ in range(5)))
        await until(lambda: edge.capacity.requests == 6, 5.0)
        assert edge.capacity.buffered_bytes > 5 * MIB
        stream.call.cancel()
        await until_free(edge.capacity)
