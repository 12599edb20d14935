"""Memory of clients that requests name, over REST, gRPC and streams of gRPC: counted, and read once they are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from dynamo.common.errors import RateLimited
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.kserve.regions import ClientRegion, Regions
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.config import CapacityOptions
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import Edge, open_edge
from tests.support.fakes import FakeClient, FakeStream, tensor_card
from tests.support.http_edge import HttpEdge, chat_card, open_http_edge
from tests.support.waiting import until, until_free

MIB = 1 << 20
BOUND = CapacityOptions(max_buffered_bytes=3 * MIB + 64 * 1024)


@dataclass
class ProtocolEdge:
    """An edge by one protocol; `infer` names a MiB of the client's memory, and returns "ok", or how it was refused."""

    infer: Callable[[], AbstractAsyncContextManager[asyncio.Task[str]]]
    client: FakeClient
    capacity: Capacity


@pytest.fixture
def kserve(tmp_path: Path) -> KserveServer:
    (tmp_path / "memory").write_bytes(bytes(range(256)) * (MIB // 256))
    regions = Regions(str(tmp_path))
    regions.register("r", "memory", 0, MIB)
    return KserveServer(shared_regions=regions)


def in_memory(tensor: Any) -> None:
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = MIB


def message() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="adder")
    in_memory(request.inputs.add(name="x", datatype="INT32", shape=[MIB // 4]))
    return request


def body(name: str = "x", datatype: str = "INT32", count: int = MIB // 4) -> dict[str, Any]:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": MIB}
    return {"inputs": [{"name": name, "datatype": datatype, "shape": [count], "parameters": parameters}]}


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Task[str]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def by_rest(edge: HttpEdge) -> str:
    response = await edge.post("/v2/models/adder/infer", body())
    return "ok" if response.status_code == 200 else f"{response.status_code} {response.json()['error']}"


async def by_grpc(edge: Edge) -> str:
    try:
        await edge.infer(message())
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    return "ok"


async def by_stream(edge: Edge) -> str:
    stream = edge.stream()
    try:
        await stream.send(message())
        (response,) = await stream.rest()
        return response.error_message or "ok"
    finally:
        stream.call.cancel()


@pytest.fixture(params=["rest", "grpc", "stream"])
async def edge(request: pytest.FixtureRequest, kserve: KserveServer) -> AsyncIterator[ProtocolEdge]:
    card = tensor_card("adder")
    if request.param == "rest":
        async with open_http_edge(card, capacity=BOUND, kserve=kserve) as http:
            yield ProtocolEdge(lambda: running(by_rest(http)), http.client, http.capacity)
    else:
        ask = by_grpc if request.param == "grpc" else by_stream
        async with open_edge(card, capacity=BOUND, kserve=kserve) as edge:
            yield ProtocolEdge(lambda: running(ask(edge)), edge.client, edge.capacity)


def respond_briefly(stream: FakeStream) -> None:
    """Respond with one element: a long response would need room of its own."""
    response = pb.ModelInferResponse(model_name="adder", model_version="1", raw_output_contents=[bytes(4)])
    response.outputs.add(name="y", datatype="INT32", shape=[1])
    stream.end(response.SerializeToString())


async def test_no_more_memory_of_clients_is_read_at_once_than_requests_may_hold(edge: ProtocolEdge) -> None:
    async with AsyncExitStack() as stack:
        tasks = []
        for count in (1, 2, 3):
            tasks.append(await stack.enter_async_context(edge.infer()))
            streams = await edge.client.opened_streams(count)
        assert 3 * MIB < edge.capacity.buffered_bytes <= BOUND.max_buffered_bytes
        for _ in range(9):
            async with edge.infer() as further:
                outcome = await asyncio.wait_for(further, 120)
                assert "is near its limit" in outcome
        for stream in streams[:2]:
            (raw,) = TensorRequest.parse(bytes(stream.body)).raw_inputs
            assert bytes(raw) == bytes(range(256)) * (MIB // 256)
            respond_briefly(stream)
        assert [await asyncio.wait_for(task, 120) for task in tasks[:2]] == ["ok", "ok"]
        await until(lambda: edge.capacity.buffered_bytes < 2 * MIB)
        tasks[2].cancel()
        await until_free(edge.capacity)


async def test_memory_of_a_client_is_not_read_for_a_request_that_limits_refuse(
    edge: ProtocolEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise RateLimited("too many at once")

    def read(*arguments: object) -> NoReturn:
        raise AssertionError("it is read")

    monkeypatch.setattr(type(ANONYMOUS), "admit", refuse)
    monkeypatch.setattr(ClientRegion, "read", read)
    async with edge.infer() as refused:
        assert "too many at once" in await asyncio.wait_for(refused, 120)
    await until_free(edge.capacity)


async def test_memory_that_is_gone_when_it_is_read_gives_its_bytes_back(edge: ProtocolEdge, tmp_path: Path) -> None:
    with (tmp_path / "memory").open("r+b") as memory:
        memory.truncate(10)
    async with edge.infer() as refused:
        assert "smaller than when it was registered" in await asyncio.wait_for(refused, 120)
    await until_free(edge.capacity)


async def test_texts_in_memory_count_too_and_as_one_of_the_requests_at_once(
    kserve: KserveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = body("text_input", "BYTES", 1)
    async with open_http_edge(chat_card(), capacity=CapacityOptions(max_buffered_bytes=MIB), kserve=kserve) as edge:
        full = await edge.post("/v2/models/talker/infer", texts)

        def refuse(*arguments: object) -> NoReturn:
            raise RateLimited("too many at once")

        monkeypatch.setattr(type(ANONYMOUS), "occupy", refuse)
        refused = await edge.post("/v2/models/talker/infer", texts)
        await until_free(edge.capacity)
    assert (full.status_code, refused.status_code) == (503, 429)
