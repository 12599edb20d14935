from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import numpy as np
import pytest

from dynamo.common.errors import DeadlineExceeded, EngineError, InvalidRequest, ModelNotFound
from dynamo.common.generation import (
    Delta,
    GenerateRequest,
    Sampling,
    Stop,
    Summary,
    delta_decoder,
    pack_tokens,
    request_encoder,
    summary_decoder,
)
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.protos.inference_pb2 import (
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelStatistics,
    ModelStatisticsResponse,
)
from dynamo.worker.engine.base import Context, EngineLoad, TensorResponse
from dynamo.worker.engine.echo import EchoTensors, EchoTokens
from dynamo.worker.serve import ServedModel, Service
from tests.support.incoming import FakeIncoming
from tests.support.shapes import EXPENSIVE

FP32 = TensorSpec(name="X", datatype="FP32", shape=(-1, 2))
BYTES = TensorSpec(name="S", datatype="BYTES", shape=(-1,))


def card(**changes: object) -> ModelCard:
    fields = {"name": "m", "kind": ModelKind.TENSOR, "inputs": (FP32, BYTES), "outputs": (FP32, BYTES), **changes}
    return ModelCard(**fields)  # type: ignore[arg-type]


class Scripted:
    """A tensor engine that gives the responses, or raises the error, that a test wants."""

    def __init__(self, *responses: TensorResponse | Exception) -> None:
        self.responses = responses
        self.contexts: list[Context] = []
        self.closed = 0

    async def start(self) -> Sequence[ModelCard]:
        return []

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        self.contexts.append(context)
        try:
            for response in self.responses:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            self.closed += 1

    async def close(self) -> None:
        return


def service(engine: object, served: ModelCard | None = None) -> Service:
    return Service([ServedModel.of(served or card(), engine)])  # type: ignore[arg-type]


def infer_request(*, typed: bool = False, **head: object) -> bytes:
    request = ModelInferRequest(**{"model_name": "m", "id": "id-1", **head})  # type: ignore[arg-type]
    x = request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    s = request.inputs.add(name="S", datatype="BYTES", shape=[1])
    if typed:
        x.contents.CopyFrom(InferTensorContents(fp32_contents=[1, 2]))
        s.contents.CopyFrom(InferTensorContents(bytes_contents=[b"hi"]))
    else:
        request.raw_input_contents.extend([b"\0\0\x80\x3f\0\0\0\x40", b"\2\0\0\0hi"])
    return request.SerializeToString()


def empty_response() -> TensorResponse:
    return TensorResponse(ModelInferResponse())


async def infer(engine: object, body: bytes, served: ModelCard | None = None) -> ModelInferResponse:
    incoming = FakeIncoming(body)
    await service(engine, served).infer(incoming)
    assert incoming.final is not None
    assert not incoming.sent
    return ModelInferResponse.FromString(incoming.final)


def statistics_of(service: Service, version: str = "1") -> ModelStatistics:
    return service.models[0].statistics[version].to_message()


async def test_a_raw_request_gets_a_raw_response_with_its_id_model_and_version() -> None:
    response = await infer(EchoTensors(), infer_request(), card(versions=("1", "2")))
    assert (response.id, response.model_name, response.model_version) == ("id-1", "m", "2")
    assert [output.name for output in response.outputs] == ["X", "S"]
    assert list(response.raw_output_contents) == [b"\0\0\x80\x3f\0\0\0\x40", b"\2\0\0\0hi"]


async def test_a_typed_request_gets_a_raw_response() -> None:
    response = await infer(EchoTensors(), infer_request(typed=True))
    assert list(response.raw_output_contents) == [b"\0\0\x80\x3f\0\0\0\x40", b"\2\0\0\0hi"]
    assert not any(output.HasField("contents") for output in response.outputs)


async def test_only_requested_outputs_are_returned() -> None:
    response = await infer(EchoTensors(), infer_request(outputs=[{"name": "S"}]))
    assert [output.name for output in response.outputs] == ["S"]
    assert list(response.raw_output_contents) == [b"\2\0\0\0hi"]


async def test_the_requested_version_reaches_the_engine() -> None:
    engine = Scripted(empty_response())
    response = await infer(engine, infer_request(model_version="1"), card(versions=("1", "2")))
    assert (engine.contexts[0].version, response.model_version) == ("1", "1")


@pytest.mark.parametrize("head", [{"model_name": "other"}, {"model_version": "9"}])
async def test_an_unknown_model_or_version_is_not_found(head: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound):
        await infer(EchoTensors(), infer_request(**head))


async def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        await infer(EchoTensors(), b"\xff\xff\xff")


async def test_the_response_to_an_alias_has_the_requested_name() -> None:
    response = await infer(EchoTensors(), infer_request(model_name="also"), card(aliases=("also",)))
    assert response.model_name == "also"


async def test_a_request_past_its_deadline_is_refused_and_not_computed() -> None:
    engine = Scripted(empty_response())
    served = service(engine)
    with pytest.raises(DeadlineExceeded):
        await served.infer(FakeIncoming(infer_request(), deadline=asyncio.get_running_loop().time() - 0.001))
    assert not engine.contexts
    assert statistics_of(served).inference_stats.fail.count == 1


@pytest.mark.parametrize("responses", [(), (empty_response(), empty_response())])
async def test_a_model_that_is_not_decoupled_must_give_exactly_one_response(responses: tuple[TensorResponse, ...]) -> None:
    engine = Scripted(*responses)
    with pytest.raises(EngineError, match="'m' gave"):
        await infer(engine, infer_request())
    assert engine.closed == 1


async def test_an_engine_that_contradicts_itself_is_an_engine_error() -> None:
    head = ModelInferResponse()
    head.outputs.add(name="X", datatype="FP32", shape=[1, 2])
    for raws in ([b"\0" * 7], [b"\0" * 8, b""]):
        with pytest.raises(EngineError):
            await infer(Scripted(TensorResponse(ModelInferResponse.FromString(head.SerializeToString()), raws)), infer_request())


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_decoupled_model_sends_each_response_and_then_an_empty_end(count: int) -> None:
    incoming = FakeIncoming(infer_request())
    served = service(Scripted(*(empty_response() for _ in range(count))), card(decoupled=True))
    await served.infer(incoming)
    assert [ModelInferResponse.FromString(sent).id for sent in incoming.sent] == ["id-1"] * count
    assert incoming.final == b""


async def test_a_slow_caller_holds_its_own_stream_back() -> None:
    incoming = FakeIncoming(infer_request(), window=2)
    served = service(Scripted(*(empty_response() for _ in range(5))), card(decoupled=True))
    task = asyncio.create_task(served.infer(incoming))
    await incoming.waiting.wait()
    assert len(incoming.sent) == 2
    incoming.grant(10)
    await task
    assert len(incoming.sent) == 5


@pytest.mark.parametrize("decoupled", [False, True])
async def test_a_long_classification_lets_the_loop_run_and_ends_with_its_request(decoupled: bool) -> None:
    head = ModelInferResponse()
    head.outputs.add(name="X", datatype="FP32", shape=[8_000_000])
    rising = np.arange(8_000_000, dtype=np.float32)  # so that each step finds higher values
    response = TensorResponse(head, [rising.view(np.uint8).data])
    request = infer_request(outputs=[{"name": "X", "parameters": {"classification": {"int64_param": 5}}}])
    served, turns = service(Scripted(response), card(decoupled=decoupled)), 0
    task = asyncio.create_task(served.infer(FakeIncoming(request)))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 5:
            task.cancel()
    assert task.cancelled()
    assert turns < 10


@pytest.mark.parametrize("decoupled", [False, True])
async def test_large_responses_alone_are_lent_in_steps(decoupled: bool) -> None:
    for size, is_large in ((1000, False), (9 << 20, True)):
        head = ModelInferResponse()
        head.outputs.add(name="X", datatype="UINT8", shape=[size])
        incoming = FakeIncoming(infer_request())
        await service(Scripted(TensorResponse(head, [bytes(size)])), card(decoupled=decoupled)).infer(incoming)
        [sent] = incoming.sent if decoupled else [incoming.final or b""]
        assert incoming.lent_bytes == [len(sent)] * is_large


async def test_a_response_with_long_bytes_lets_the_loop_run() -> None:
    head, strings = ModelInferResponse(), encode_bytes([b""] * 999_999 + [b"a"])
    head.outputs.add(name="S", datatype="BYTES", shape=[1_000_000])
    incoming, turns = FakeIncoming(infer_request()), 0
    task = asyncio.create_task(service(Scripted(TensorResponse(head, [strings]))).infer(incoming))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    assert incoming.final is not None and ModelInferResponse.FromString(incoming.final).raw_output_contents[0] == strings
    assert turns > 5


class Endless:
    """A language model that never stops, and sets an event when it is closed."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.closed = asyncio.Event()
        self.pause = asyncio.Event()

    async def start(self) -> ModelCard:
        return llm_card()

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        try:
            while True:
                yield Delta((1,))
                self.started.set()
                await self.pause.wait()
        finally:
            self.closed.set()

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        return


def llm_card(name: str = "echo-llm") -> ModelCard:
    return ModelCard(name=name, kind=ModelKind.LLM, llm=LlmInfo(context_length=10, tokenizer="", adapters=("lora",)))


def generate_request(model: str = "echo-llm", max_tokens: int = 3) -> bytes:
    return request_encoder.encode(GenerateRequest(model=model, prompt=pack_tokens([5, 6]), stop=Stop(max_tokens=max_tokens)))


@pytest.mark.parametrize("name", ["echo-llm", "lora"])
async def test_tokens_are_sent_as_they_come_and_a_summary_ends_them(name: str) -> None:
    incoming = FakeIncoming(generate_request(name))
    served = service(EchoTokens(), llm_card())
    await served.generate(incoming)
    assert [delta_decoder.decode(sent).tokens for sent in incoming.sent] == [(5,), (6,), (5,)]
    assert incoming.final is not None
    assert summary_decoder.decode(incoming.final) == Summary(prompt_tokens=2, output_tokens=3)
    statistics = statistics_of(served)
    assert (statistics.inference_count, statistics.inference_stats.success.count) == (1, 1)


async def test_a_slow_reader_of_tokens_holds_the_engine_back() -> None:
    incoming = FakeIncoming(generate_request(max_tokens=9), window=4)
    task = asyncio.create_task(service(EchoTokens(), llm_card()).generate(incoming))
    await incoming.waiting.wait()
    assert len(incoming.sent) == 4
    incoming.grant(100)
    await task
    assert len(incoming.sent) == 9


@pytest.mark.parametrize("stuck_in", ["engine", "credit"])
async def test_cancelling_a_generation_closes_the_engines_iterator_at_once(stuck_in: str) -> None:
    engine = Endless()
    served = service(engine, llm_card())
    incoming = FakeIncoming(generate_request(), window=1 if stuck_in == "credit" else 10)
    if stuck_in == "credit":
        engine.pause.set()
    task = asyncio.create_task(served.generate(incoming))
    await (incoming.waiting if stuck_in == "credit" else engine.started).wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.closed.is_set()
    assert statistics_of(served).response_stats["0"].cancel.count == 1
    assert statistics_of(served).inference_stats.fail.count == 0


async def test_a_generation_without_a_summary_is_an_engine_error() -> None:
    class Silent(Endless):
        async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
            yield Delta((1,))

    with pytest.raises(EngineError, match="summary"):
        await service(Silent(), llm_card()).generate(FakeIncoming(generate_request()))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", b"\x80", b"\x91" * 5000])
async def test_bytes_that_are_no_generate_request_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await service(EchoTokens(), llm_card()).generate(FakeIncoming(body))


@pytest.mark.parametrize("name", ["minItems", "a regex", "a grammar", "long choices", "a structural tag"])
async def test_structured_output_that_no_frontend_should_have_sent_does_not_reach_the_engine(name: str) -> None:
    guided, bound = EXPENSIVE[name]
    request = GenerateRequest(model="echo-llm", prompt=pack_tokens([5]), sampling=Sampling(guided=guided))
    engine = Endless()
    with pytest.raises(InvalidRequest, match=bound):
        await service(engine, llm_card()).generate(FakeIncoming(request_encoder.encode(request)))
    assert not engine.started.is_set()


async def test_a_tensor_model_cannot_generate_tokens() -> None:
    with pytest.raises(ModelNotFound):
        await service(EchoTensors()).generate(FakeIncoming(generate_request("m")))


async def test_statistics_are_those_of_the_requests_that_were_served() -> None:
    served = service(Scripted(empty_response()), card(max_batch_size=4, versions=("1", "2")))
    for _ in range(3):
        await served.infer(FakeIncoming(infer_request()))
    served.models[0].engine.responses = (EngineError("no"),)  # type: ignore[union-attr]
    with pytest.raises(EngineError):
        await served.infer(FakeIncoming(infer_request(model_version="1")))
    newest, oldest = statistics_of(served, "2"), statistics_of(served, "1")
    assert (newest.inference_count, newest.execution_count, newest.inference_stats.success.count) == (3, 3, 3)
    assert newest.inference_stats.success.ns >= newest.inference_stats.compute_infer.ns > 0
    assert [(batch.batch_size, batch.compute_infer.count) for batch in newest.batch_stats] == [(1, 3)]
    assert newest.last_inference > 1_600_000_000_000
    assert (oldest.inference_count, oldest.inference_stats.fail.count, oldest.inference_stats.success.count) == (0, 1, 0)


async def test_responses_of_a_decoupled_model_are_counted_by_their_index() -> None:
    head = ModelInferResponse()
    head.outputs.add(name="S", datatype="BYTES", shape=[0])
    responses = [TensorResponse(head, [b""]), empty_response(), EngineError("broken")]
    served = service(Scripted(*responses), card(decoupled=True))
    with pytest.raises(EngineError):
        await served.infer(FakeIncoming(infer_request()))
    responses = statistics_of(served).response_stats
    assert (responses["0"].success.count, responses["1"].empty_response.count, responses["2"].fail.count) == (1, 1, 1)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [("m", "1"), ("m", "2"), ("n", "1")]),
        ({"model": "m"}, [("m", "1"), ("m", "2")]),
        ({"model": "m", "version": "2"}, [("m", "2")]),
    ],
)
async def test_statistics_cover_the_queried_models(query: dict[str, str], expected: list[tuple[str, str]]) -> None:
    served = Service([ServedModel.of(card(versions=("1", "2")), EchoTensors()), ServedModel.of(card(name="n"), EchoTensors())])
    incoming = FakeIncoming(msgspec.msgpack.encode(query))
    await served.statistics(incoming)
    assert incoming.final is not None
    statistics = ModelStatisticsResponse.FromString(incoming.final).model_stats
    assert [(model.name, model.version) for model in statistics] == expected


@pytest.mark.parametrize("query", [{"model": "x"}, {"model": "m", "version": "7"}])
async def test_statistics_of_unknown_models_are_not_found(query: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound):
        await service(EchoTensors()).statistics(FakeIncoming(msgspec.msgpack.encode(query)))


async def test_a_ping_is_responded_to_with_the_models_that_are_served() -> None:
    served, incoming = service(EchoTensors()), FakeIncoming(b"")
    await served.ping(incoming)
    served.remove("m")
    none_served = FakeIncoming(b"")
    await served.ping(none_served)
    assert [msgspec.msgpack.decode(each.final or b"") for each in (incoming, none_served)] == [["m"], []]


@pytest.mark.parametrize(
    "models",
    [
        lambda: [ServedModel.of(card(), EchoTensors()), ServedModel.of(card(name="n", aliases=("m",)), EchoTensors())],
        lambda: [ServedModel.of(llm_card(), EchoTensors())],
        lambda: [ServedModel.of(card(), EchoTokens())],
    ],
)
async def test_models_that_cannot_be_served_together_are_refused(models: Callable[[], list[ServedModel]]) -> None:
    with pytest.raises(InvalidRequest):
        Service(models())
