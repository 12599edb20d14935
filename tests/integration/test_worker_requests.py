"""The worker's handlers behind a real nats-server: what a frontend sends, and gets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from dynamo.common.errors import InvalidRequest, ShuttingDown, Unavailable
from dynamo.common.generation import GenerateRequest, Stop, Summary, delta_decoder, pack_tokens, request_encoder, summary_decoder
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.model_card import ModelCard
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import NatsOptions
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from dynamo.worker.engine.base import Engine, TensorEngine
from dynamo.worker.engine.echo import EchoTensors, EchoTokens
from dynamo.worker.engine.python import PythonEngine, Tensor
from dynamo.worker.serve import ServedModel, Service
from tests.support.servers import NatsServer
from tests.support.waiting import until


@dataclass
class Bus:
    client: RequestClient
    server: RequestServer
    instance: InstanceId
    subject: str
    service: Service

    async def infer(self, request: ModelInferRequest) -> ModelInferResponse:
        async with self.client.open(self.instance, self.subject, "infer", request.SerializeToString()) as stream:
            return ModelInferResponse.FromString(bytes(await stream.result()))

    async def stream(self, verb: str, body: bytes) -> tuple[list[bytes], bytes]:
        responses: list[bytes] = []
        async with self.client.open(self.instance, self.subject, verb, body) as stream:
            while read := await stream.read():
                responses += map(bytes, read)
            return responses, bytes(stream.trailer)


@asynccontextmanager
async def served(nats: NatsServer, namespace: str, *engines: Engine | TensorEngine) -> AsyncIterator[Bus]:
    models: list[ServedModel] = []
    for engine in engines:
        cards: ModelCard | Sequence[ModelCard] = await engine.start()
        models += [ServedModel.of(card, engine) for card in ([cards] if isinstance(cards, ModelCard) else cards)]
    service = Service(models)
    endpoint, instance, config = Endpoint(namespace), new_instance_id(), NatsOptions(servers=(nats.url,))
    async with (
        connect_nats(config, "worker") as theirs,
        connect_nats(config, "frontend") as ours,
        serve_requests(theirs, endpoint, instance, service.handlers) as server,
        open_client(ours, namespace) as client,
    ):
        yield Bus(client, server, instance, endpoint.rpc_subject(instance), service)
    for engine in engines:
        await engine.close()


def echo_request(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> ModelInferRequest:
    request = ModelInferRequest(model_name="echo", id="7", raw_input_contents=[values.tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=values.shape)
    return request


@pytest.mark.parametrize("size", [0, 16, 4096, 262_144, 4_000_000])
async def test_tensors_of_any_size_come_back_as_they_were(nats_server: NatsServer, namespace: str, size: int) -> None:
    values = np.random.default_rng(size).random(size, np.float32)
    async with served(nats_server, namespace, EchoTensors()) as bus:
        response = await bus.infer(echo_request(values))
    assert (response.id, response.model_name, response.model_version) == ("7", "echo", "1")
    assert response.raw_output_contents[0] == values.tobytes()


async def test_concurrent_requests_share_batches_of_the_classifier(nats_server: NatsServer, namespace: str) -> None:
    async with served(nats_server, namespace, PythonEngine.load("examples/classifier.py:Classifier")) as bus:
        digits = sys.modules["dynamo_model_classifier"].prototypes()

        def request(digit: int) -> ModelInferRequest:
            request_message = ModelInferRequest(model_name="classifier", raw_input_contents=[digits[digit].tobytes()])
            request_message.inputs.add(name="image", datatype="FP32", shape=[1, 8, 8])
            request_message.outputs.add(name="digit")
            return request_message

        responses = await asyncio.gather(*(bus.infer(request(n % 10)) for n in range(64)))
        statistics = bus.service.models[0].statistics["1"].to_message()
    digits = [int.from_bytes(response.raw_output_contents[0], "little") for response in responses]
    assert digits == [n % 10 for n in range(64)]
    assert statistics.inference_count == 64
    assert statistics.execution_count < 32
    assert sum(batch.batch_size * batch.compute_infer.count for batch in statistics.batch_stats) == 64


async def test_a_decoupled_model_streams_and_its_refusal_is_the_callers_mistake(nats_server: NatsServer, namespace: str) -> None:
    async with served(nats_server, namespace, PythonEngine.load("examples/countdown.py:Countdown")) as bus:
        request = ModelInferRequest(model_name="countdown")
        tensor = request.inputs.add(name="start", datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(3)
        responses, _ = await bus.stream("infer", request.SerializeToString())
        left = [
            int.from_bytes(ModelInferResponse.FromString(response).raw_output_contents[0], "little") for response in responses
        ]
        assert left == [3, 2, 1, 0]
        tensor.contents.int_contents[0] = -5
        with pytest.raises(InvalidRequest, match="start is -5"):
            await bus.stream("infer", request.SerializeToString())


async def test_many_token_streams_run_at_once_and_each_is_whole(nats_server: NatsServer, namespace: str) -> None:
    async with served(nats_server, namespace, EchoTokens()) as bus:

        async def one(seed: int) -> None:
            prompt = list(range(seed, seed + 50))
            body = request_encoder.encode(
                GenerateRequest(model="echo-llm", prompt=pack_tokens(prompt), stop=Stop(max_tokens=120))
            )
            responses, trailer = await bus.stream("generate", body)
            tokens = [token for response in responses for token in delta_decoder.decode(response).tokens]
            assert tokens == (prompt * 3)[:120]
            assert summary_decoder.decode(trailer) == Summary(prompt_tokens=50, output_tokens=120)

        await asyncio.gather(*(one(seed) for seed in range(40)))


async def test_a_caller_that_leaves_stops_the_engine(nats_server: NatsServer, namespace: str) -> None:
    engine = EchoTokens()
    async with served(nats_server, namespace, engine) as bus:
        body = request_encoder.encode(
            GenerateRequest(model="echo-llm", prompt=pack_tokens([1]), stop=Stop(max_tokens=10_000_000))
        )
        async with bus.client.open(bus.instance, bus.subject, "generate", body) as stream:
            await stream.read()
            assert engine.load().running == 1
        async with asyncio.timeout(120):
            await bus.server.drained()
        assert engine.load().running == 0


class Gate:
    """A model that responds when the test allows it."""

    name = "echo"
    inputs = outputs = {"INPUT0": Tensor("FP32", [-1])}  # noqa: RUF012

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def infer(self, INPUT0: object) -> object:
        self.entered.set()
        await self.open.wait()
        return INPUT0


async def test_draining_finishes_what_is_open_and_refuses_what_is_new(nats_server: NatsServer, namespace: str) -> None:
    gate = Gate()
    async with served(nats_server, namespace, PythonEngine(lambda: gate)) as bus:
        open_request = asyncio.create_task(bus.infer(echo_request(np.zeros(4, np.float32))))
        await gate.entered.wait()
        bus.server.refuse_new()
        with pytest.raises(Unavailable) as refused:
            await bus.infer(echo_request(np.zeros(4, np.float32)))
        assert refused.value.retryable
        assert str(ShuttingDown("the worker")) in str(refused.value)
        gate.open.set()
        async with asyncio.timeout(120):
            await bus.server.drained()
        assert (await open_request).id == "7"


async def test_a_request_past_its_deadline_is_not_computed(nats_server: NatsServer, namespace: str) -> None:
    async with served(nats_server, namespace, EchoTensors()) as bus:
        slow = echo_request(np.zeros(4, np.float32))
        slow.parameters["delay_ms"].int64_param = 60_000
        deadline = asyncio.get_running_loop().time() + 0.2
        with pytest.raises(Exception, match="deadline"):
            async with bus.client.open(bus.instance, bus.subject, "infer", slow.SerializeToString(), deadline=deadline) as stream:
                await stream.result()
        statistics = bus.service.models[0].statistics["1"]
        await until(lambda: statistics.to_message().response_stats["0"].cancel.count == 1)
