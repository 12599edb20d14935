"""gRPC calls count, with all other requests, against the capacity of the process."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import grpc.aio
import pytest

from dynamo.common.errors import Overloaded
from dynamo.common.etcd import Events, KeyValue, Put
from dynamo.common.generation import Delta, FinishReason, Summary, delta_encoder, summary_encoder
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, encode_standby
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.config import CapacityOptions
from dynamo.frontend.fleet.standby import StandbyView
from dynamo.frontend.router.demand import WaitingRequests
from dynamo.frontend.security.accounts import KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import Edge, open_edge
from tests.support.fake_etcd import FakeEtcd
from tests.support.fakes import ENDPOINT, FakeStream, echo_tensor, llm_card, tensor_card
from tests.support.waiting import until, until_free

MIB = 2**20


def request(size: int = 8) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=tensor_card().name, id="a")
    message.inputs.add(name="x", datatype="INT32", shape=[size // 4])
    message.raw_input_contents.append(bytes(size))
    return message


def infer_response(size: int) -> bytes:
    message = pb.ModelInferResponse(model_name=tensor_card().name)
    message.outputs.add(name="x", datatype="INT32", shape=[size // 4])
    message.raw_output_contents.append(bytes(size))
    return message.SerializeToString()


async def refused(edge: Edge, method: str, message: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await edge.call(method, message)
    return failure.value


async def test_messages_beyond_the_capacity_are_unavailable_and_give_their_bytes_back() -> None:
    async with open_edge(tensor_card(), capacity=CapacityOptions(max_buffered_bytes=2 * MIB)) as edge:
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


async def test_each_request_within_a_stream_counts_and_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_edge(tensor_card(), capacity=CapacityOptions(max_concurrent_requests=3)) as edge:
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
        await until(lambda: edge.capacity.requests == 3, 120)
        await stream.send(request())
        async with asyncio.timeout(120):
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


async def test_responses_that_wait_for_those_before_them_in_a_stream_count() -> None:
    async with open_edge(tensor_card(), capacity=CapacityOptions(max_buffered_bytes=7 * MIB)) as edge:
        stream = edge.stream()
        await stream.send(*(request() for _ in range(4)))
        first, *others = await edge.client.opened_streams(4)
        for number, other in enumerate(others[:2], 1):
            other.end(infer_response(3 * MIB))
            await until(lambda number=number: edge.capacity.buffered_bytes > 3 * number * MIB, 120)  # type: ignore[misc]
        others[2].end(infer_response(3 * MIB))
        first.end(infer_response(8))
        problems = [(await stream.read()).error_message for _ in range(4)]
        assert problems[:3] == ["", "", ""]
        assert "near its limit" in problems[3]
        assert await stream.rest() == []
        await until_free(edge.capacity)


async def test_a_stream_that_its_client_cancels_gives_everything_back() -> None:
    async with open_edge(tensor_card()) as edge:
        stream = edge.stream()
        await stream.send(*(request(MIB) for _ in range(5)))
        await until(lambda: edge.capacity.requests == 6, 120)
        assert edge.capacity.buffered_bytes > 5 * MIB
        stream.call.cancel()
        await until_free(edge.capacity)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_a_whole_text_is_gathered_from_counts_while_it_grows(is_stream: bool) -> None:
    def respond(tokens: int, stream: FakeStream) -> None:
        stream.data(delta_encoder.encode(Delta(tuple(range(tokens)), 0, FinishReason.STOP)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=1, output_tokens=tokens)))

    message = pb.ModelInferRequest(model_name=llm_card().name, id="a")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    async with open_edge(llm_card(), capacity=CapacityOptions(max_buffered_bytes=500_000)) as edge:
        for tokens, words in ((20_000, "near its limit"), (5, "")):
            edge.client.respond = partial(respond, tokens)
            if is_stream:
                stream = edge.stream()
                await stream.send(message)
                [response] = await stream.rest()
                problem = response.error_message
            elif words:
                problem = (await refused(edge, "ModelInfer", message)).details() or ""
            else:
                await edge.infer(message)
                problem = ""
            assert (words in problem, bool(words)) == (True, bool(problem))
            await until_free(edge.capacity)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_requests_of_a_key_hold_that_wait_for_a_start_leaves_room_for_others(is_stream: bool) -> None:
    view, record = StandbyView(FakeEtcd(), "dynamo"), Standby(card=tensor_card(), endpoint=ENDPOINT)  # type: ignore[arg-type]
    view.apply(Events((Put(KeyValue(record.key, encode_standby(record), 2)),), 2))
    key = KeyAccount(ApiKey(name="heavy", salt=b"", digest=b""))
    async with open_edge(capacity=CapacityOptions(max_buffered_bytes=10 * MIB), standby=view, account=key) as edge:
        running, waiting = [], Pool(tensor_card().name)

        async def infer() -> None:
            if not is_stream:
                await edge.infer(request(2 * MIB))
                return
            stream = edge.stream(metadata=(("triton_grpc_error", "true"),))
            await stream.send(request(2 * MIB))
            await stream.read()

        for number in range(1, 3):
            running.append(asyncio.create_task(infer()))
            await until(lambda count=number: edge.plane.waiting().get(waiting) == WaitingRequests(count))  # type: ignore[misc]
        with pytest.raises(grpc.aio.AioRpcError, match="of the API key 'heavy' wait for instances") as refusal:
            await infer()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in running:
            each.cancel()
        await until_free(edge.capacity)
