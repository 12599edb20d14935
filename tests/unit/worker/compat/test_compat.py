"""Handlers of NVIDIA Dynamo's workers as engines: what they may yield, and what happens when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stop,
    Summary,
    TextPrompt,
    pack_text,
    pack_tokens,
)
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.compat import llm
from dynamo.worker.compat.engines import AnyResponses, Context, make_engine
from dynamo.worker.compat.models import ModelInput, RegisteredModel
from dynamo.worker.compat.runtime import DistributedRuntime, Endpoint
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context as RequestContext
from dynamo.worker.engine.base import Engine
from dynamo.worker.engine.declaration import Declaration
from dynamo.worker.engine.echo import byte_tokenizer
from dynamo.worker.engine.python import InferContext, PythonEngine


def handler(*items: Any) -> Any:
    async def generate(request: dict[str, Any]) -> AsyncIterator[Any]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    return generate


@pytest.fixture
def tokens(tmp_path: Path) -> RegisteredModel:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer())
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    return RegisteredModel(ModelInput.Tokens, "tokens", str(tmp_path))


TEXT = RegisteredModel(ModelInput.Text, "texts", "org/texts", tool_parser="hermes")


async def run(model: RegisteredModel, generate: Any, request: GenerateRequest) -> list[Delta | Summary]:
    engine = make_engine(model, generate)
    assert isinstance(engine, Engine)
    await engine.start()
    return [item async for item in engine.generate(request, RequestContext("r1"))]


def text_request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="texts", prompt=pack_text(TextPrompt(messages=[{"role": "user", "content": "hi"}])), **fields)


def token_request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="tokens", prompt=pack_tokens((1, 2, 3)), **fields)


async def test_a_text_handler_may_yield_texts_or_chunks_and_need_not_end_them() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "b"}}], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    assert await run(TEXT, handler("a", chunk), text_request()) == [
        Delta(text="a"),
        Delta(text="b"),
        Delta(finish_reason=FinishReason.STOP),
        Summary(prompt_tokens=4, output_tokens=2, prefill_ms=pytest.approx(0, abs=1e4)),
    ]


async def test_a_text_handler_gets_openais_request() -> None:
    seen: list[Any] = []

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[str]:
        seen.extend((request, context.id()))
        yield "a"

    await run(TEXT, generate, text_request(stop=Stop(max_tokens=3)))
    request, request_id = seen
    assert (request["messages"], request["max_tokens"], request_id) == ([{"role": "user", "content": "hi"}], 3, "r1")


async def test_a_token_handler_gets_and_yields_token_ids(tokens: RegisteredModel) -> None:
    seen: list[Any] = []

    async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        seen.append(request)
        yield {"token_ids": [7, 8]}
        yield {"token_ids": [9], "finish_reason": "length"}

    items = await run(tokens, generate, token_request(stop=Stop(max_tokens=3), sampling=Sampling(temperature=0.5)))
    assert items[:2] == [Delta((7, 8)), Delta((9,), finish_reason=FinishReason.LENGTH)]
    assert isinstance(items[2], Summary) and (items[2].prompt_tokens, items[2].output_tokens) == (3, 3)
    [request] = seen
    assert (request["token_ids"], request["stop_conditions"]["max_tokens"]) == ([1, 2, 3], 3)
    assert request["sampling_options"]["temperature"] == 0.5


async def test_the_card_is_what_the_worker_registered(tokens: RegisteredModel) -> None:
    engine = make_engine(tokens, handler())
    assert isinstance(engine, Engine)
    card = await engine.start()
    assert card.llm is not None and card.llm.context_length == 77 and not card.llm.takes_text
    engine = make_engine(TEXT, handler())
    assert isinstance(engine, Engine)
    llm_card = (await engine.start()).llm
    assert llm_card is not None and llm_card.takes_text and llm_card.tool_parser == "hermes"


def endings() -> Iterator[tuple[Any, type[Exception]]]:
    yield "cancelled", Unavailable
    yield "error: no", EngineError
    yield {"error": "no"}, EngineError


@pytest.mark.parametrize(("reason", "error"), [*endings()])
async def test_a_generation_that_failed_is_an_error(tokens: RegisteredModel, reason: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await run(tokens, handler({"token_ids": [], "finish_reason": reason}), token_request())


async def test_an_error_of_a_handler_fails_its_request(tokens: RegisteredModel) -> None:
    with pytest.raises(EngineError, match="model 'tokens' failed: ValueError: no idea"):
        await run(tokens, handler(ValueError("no idea")), token_request())


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 2}, "n"), ({"logprobs": 1}, "logprobs"), ({"sampling": Sampling(logit_bias={1: 1.0})}, "logit_bias")],
)
async def test_what_a_handler_of_tokens_cannot_do_is_refused(tokens: RegisteredModel, fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await run(tokens, handler(), token_request(**fields))
    assert refused.value.param == param


async def test_a_request_that_is_left_closes_the_handler(tokens: RegisteredModel) -> None:
    closed = asyncio.Event()

    async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"token_ids": [1]}
        finally:
            closed.set()

    engine = make_engine(tokens, generate)
    assert isinstance(engine, Engine)
    await engine.start()
    async with aclosing(engine.generate(token_request(), RequestContext("r1"))) as items:  # type: ignore[type-var]
        await anext(items)
        assert engine.load().running == 1
    assert closed.is_set() and engine.load().running == 0


async def test_a_tritons_configuration_describes_tensors() -> None:
    config = ModelConfig(name="two", backend="python")
    for side in (config.input, config.output):
        side.add(name="x", data_type="TYPE_INT32", dims=[-1])
    config.model_transaction_policy.decoupled = True
    tensors = {"triton_model_config": config.SerializeToString()}
    engine = make_engine(RegisteredModel(ModelInput.Tensor, "two", "two", tensors=tensors), handler())
    assert isinstance(engine, PythonEngine)
    [card] = await engine.start()
    assert card.decoupled and card.inputs[0].datatype == "INT32"


async def test_a_decoupled_model_has_a_response_for_each_item() -> None:
    model = RegisteredModel(ModelInput.Tensor, "two", "two", tensors={"inputs": [], "outputs": []})
    metadata = {"name": "x", "data_type": "Float32", "shape": [1]}
    items = [{"tensors": [{"metadata": metadata, "data": {"data_type": "Float32", "values": [value]}}]} for value in (1.5, 2.5)]
    generate = handler(*items)
    decoupled = AnyResponses(model, Declaration(inputs={}, outputs={}), lambda request, context: generate(request))
    responses = [response async for response in decoupled.infer(InferContext("r1", "1"))]
    assert [response["x"].tolist() for response in responses] == [[1.5], [2.5]]
    assert responses[0]["x"].dtype == np.float32


async def test_a_handler_of_tensors_learns_that_its_request_was_left() -> None:
    contexts: list[RequestContext] = []

    async def generate(request: dict[str, Any], context: RequestContext) -> AsyncIterator[dict[str, Any]]:
        contexts.append(context)
        while True:
            yield {"tensors": []}

    model = RegisteredModel(ModelInput.Tensor, "two", "two", tensors={"inputs": [], "outputs": []})
    decoupled = AnyResponses(model, Declaration(inputs={}, outputs={}), generate)
    async with aclosing(decoupled.infer(InferContext("r1", "1"))) as responses:  # type: ignore[type-var]
        assert await anext(responses) == {}
        assert not contexts[0].is_cancelled
    assert contexts[0].is_cancelled


async def test_tensors_need_a_description() -> None:
    with pytest.raises(InvalidRequest, match="needs a 'tensor_model_config'"):
        make_engine(RegisteredModel(ModelInput.Tensor, "two", "two"), handler())
    unknown = {"inputs": [{"name": "x", "data_type": "Complex", "shape": [1]}]}
    with pytest.raises(InvalidRequest, match="data_type 'Complex'"):
        make_engine(RegisteredModel(ModelInput.Tensor, "two", "two", tensors=unknown), handler())


async def test_a_model_is_registered_at_its_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    runtime = DistributedRuntime(WorkerConfig(), asyncio.Event())
    endpoint = runtime.namespace("a").component("b").endpoint("c")
    assert endpoint.address == runtime.endpoint("dyn://a.b.c").address
    kinds = llm.ModelType.Chat | llm.ModelType.Completions
    await llm.register_llm(ModelInput.Text, kinds, endpoint, "org/m", kv_cache_block_size=16)
    assert [model.name for model in endpoint.models] == ["org/m"]
    assert "kv_cache_block_size have no effect" in caplog.text
    with pytest.raises(NotImplementedError, match="Prefill"):
        await llm.register_model(ModelInput.Tokens, kinds, endpoint, "m", worker_type=llm.WorkerType.Prefill)
    for kind in (llm.ModelType.Embedding, kinds | llm.ModelType.Embedding, llm.ModelType.Prefill):
        with pytest.raises(NotImplementedError, match=r"of type (Embedding|Prefill) are not supported"):
            await llm.register_model(ModelInput.Text, kind, endpoint, "m")
    assert [model.name for model in endpoint.models] == ["org/m"]


async def test_an_endpoint_without_a_model_waits_for_the_end() -> None:
    runtime = DistributedRuntime(WorkerConfig(), asyncio.Event())
    endpoint: Endpoint = runtime.endpoint("a.b.clear_kv_blocks")
    serving = asyncio.create_task(endpoint.serve_endpoint(handler()))
    await asyncio.sleep(0)
    assert not serving.done()
    runtime.shutdown()
    await serving
