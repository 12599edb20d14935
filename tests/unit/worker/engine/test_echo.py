from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from hashlib import sha256

import pytest
from tokenizers import Tokenizer

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.response import ResponseForm
from dynamo.common.tensors.tensors import Buffer
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.base import Context, Engine, HasFiles, RespondsOnce, TensorEngine, TensorResponse
from dynamo.worker.engine.declaration import Declaration, Tensor
from dynamo.worker.engine.echo import EchoTensors, EchoTokens, echo_declaration, parse_tensors


async def generate(engine: EchoTokens, prompt: list[int], stop: Stop = Stop(), n: int = 1) -> tuple[list[Delta], Summary]:
    request = GenerateRequest(model="echo-llm", prompt=pack_tokens(prompt), stop=stop, n=n)
    steps = [step async for step in engine.generate(request, Context("r"))]
    assert isinstance(steps[-1], Summary)
    deltas = [step for step in steps[:-1] if isinstance(step, Delta)]
    assert len(deltas) == len(steps) - 1
    return deltas, steps[-1]


def test_the_echo_engines_are_engines() -> None:
    assert isinstance(EchoTensors(), TensorEngine)
    assert isinstance(EchoTensors(), RespondsOnce)
    assert isinstance(EchoTokens(), Engine)
    assert isinstance(EchoTokens(), HasFiles)


async def test_tokens_that_are_only_repeated_obey_no_constraint() -> None:
    request = GenerateRequest(model="echo-llm", prompt=pack_tokens([1, 2]), sampling=Sampling(guided={"regex": "a"}))
    with pytest.raises(InvalidRequest, match="structured output is not supported by the echo engine"):
        await anext(EchoTokens().generate(request, Context("r")))


async def test_every_input_comes_back_under_its_own_name_without_being_copied() -> None:
    head = ModelInferRequest(model_name="echo")
    head.inputs.add(name="A", datatype="FP32", shape=[8192])
    head.inputs.add(name="B", datatype="BYTES", shape=[1, 1])
    request = TensorRequest.parse(TensorRequest.build(head, [bytes(range(256)) * 128, b"\x01\0\0\0z"]).raw)
    [response] = [response async for response in EchoTensors().infer(request, Context("r"))]
    assert [(o.name, o.datatype, list(o.shape)) for o in response.head.outputs] == [("A", "FP32", [8192]), ("B", "BYTES", [1, 1])]
    assert [bytes(raw) for raw in response.raw_outputs] == [bytes(range(256)) * 128, b"\x01\0\0\0z"]
    assert response.raw_outputs[0] is request.raw_inputs[0]


async def test_parameters_of_all_kinds_are_echoed() -> None:
    head = ModelInferRequest()
    head.parameters["b"].bool_param = True
    head.parameters["i"].int64_param = -1
    head.parameters["s"].string_param = "s"
    head.parameters["d"].double_param = 0.5
    head.parameters["u"].uint64_param = 2**64 - 1
    [response] = [response async for response in EchoTensors().infer(TensorRequest.build(head), Context("r"))]
    assert response.head.parameters == head.parameters


async def test_repeat_gives_several_responses_and_is_bounded() -> None:
    head = ModelInferRequest()
    head.parameters["repeat"].int64_param = 3
    engine = EchoTensors(echo_declaration(decoupled=True))
    assert len([response async for response in engine.infer(TensorRequest.build(head), Context("r"))]) == 3
    head.parameters["repeat"].uint64_param = 2**63
    with pytest.raises(InvalidRequest, match="repeat"):
        await anext(engine.infer(TensorRequest.build(head), Context("r")))


async def encoded(response: Awaitable[TensorResponse], form: ResponseForm) -> list[Buffer]:
    made = await response
    return form.encode(made.head, made.raw_outputs)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise_exception", "intentional exception"),
        ("malformed_response", "datatype"),
        ("data_mismatch", "0 (bytes|elements|values)"),
    ],
)
async def test_faults_come_on_demand(fault: str, sentence: str, *, raw: bool) -> None:
    head = ModelInferRequest(model_name="echo")
    tensor = head.inputs.add(name="INPUT0", datatype="FP32", shape=[2])
    if not raw:
        tensor.contents.fp32_contents.extend([1, 2])
    head.parameters[fault].bool_param = True
    [card] = await EchoTensors().start()
    for echo in (EchoTensors(), EchoTensors(echo_declaration(decoupled=True))):
        request = TensorRequest.build(head, [bytes(8)] if raw else ())
        form = ResponseForm.of(request, card)

        with pytest.raises(EngineError, match=sentence):
            await encoded(echo.respond(request, Context("r")), form)
        with pytest.raises(EngineError, match=sentence):
            await encoded(anext(echo.infer(request, Context("r"))), form)


async def test_a_fault_is_a_boolean_that_may_be_false_and_needs_a_tensor_to_spoil() -> None:
    head = ModelInferRequest(model_name="echo")
    head.parameters["data_mismatch"].bool_param = False
    assert not (await EchoTensors().respond(TensorRequest.build(head), Context("r"))).head.outputs
    head.parameters["data_mismatch"].bool_param = True
    with pytest.raises(InvalidRequest, match="parameter 'data_mismatch' needs an input"):
        await EchoTensors().respond(TensorRequest.build(head), Context("r"))
    head.parameters["data_mismatch"].int64_param = 1
    with pytest.raises(InvalidRequest, match="parameter 'data_mismatch' must be a boolean"):
        await EchoTensors().respond(TensorRequest.build(head), Context("r"))


async def test_a_model_that_is_not_decoupled_responds_once_or_fails() -> None:
    head = ModelInferRequest()
    head.inputs.add(name="INPUT0", datatype="INT8", shape=[2])
    engine = EchoTensors()
    response = await engine.respond(TensorRequest.build(head, [b"ab"]), Context("r"))
    assert response.raw_outputs == [b"ab"]
    head.parameters["repeat"].int64_param = 2
    with pytest.raises(EngineError, match="not declared as decoupled"):
        await engine.respond(TensorRequest.build(head, [b"ab"]), Context("r"))


async def test_repeat_that_is_no_integer_is_refused() -> None:
    head = ModelInferRequest()
    head.parameters["repeat"].string_param = "x"
    with pytest.raises(InvalidRequest, match="'repeat' must be an integer"):
        await anext(EchoTensors().infer(TensorRequest.build(head), Context("r")))


async def test_the_default_model_takes_what_the_benchmark_sends() -> None:
    [card] = await EchoTensors().start()
    assert card.name == "echo"
    assert [(spec.name, spec.datatype, spec.shape) for spec in card.inputs] == [("INPUT0", "FP32", (-1,))]
    assert card.outputs == card.inputs


def test_outputs_that_are_no_inputs_cannot_be_echoed() -> None:
    with pytest.raises(InvalidRequest, match="'OUT'"):
        EchoTensors(Declaration(inputs={"IN": Tensor("FP32", [1])}, outputs={"OUT": Tensor("FP32", [1])}))


def test_tensors_are_declared_in_a_word() -> None:
    assert parse_tensors("A=FP32[-1,4],B=BYTES[]") == {"A": Tensor("FP32", [-1, 4]), "B": Tensor("BYTES", [])}


@pytest.mark.parametrize("text", ["", "A", "A=FP32", "A=FP32[x]", "A=FP32[1]B=FP32[1]", "A=FP32[1],", "A=FP32[1],A=FP32[1]"])
def test_a_malformed_declaration_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_tensors(text)


async def test_the_prompt_comes_back_one_token_a_step_and_over_again_up_to_max_tokens() -> None:
    deltas, summary = await generate(EchoTokens(), [7, 8, 9], Stop(max_tokens=5))
    assert [delta.tokens for delta in deltas] == [(7,), (8,), (9,), (7,), (8,)]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.LENGTH]
    assert (summary.prompt_tokens, summary.output_tokens) == (3, 5)


async def test_a_stop_token_ends_the_echo_and_is_not_part_of_it() -> None:
    deltas, summary = await generate(EchoTokens(), [7, 8, 9], Stop(max_tokens=5, token_ids=(8,)))
    assert [delta.tokens for delta in deltas] == [(7,), ()]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token, summary.output_tokens) == (FinishReason.STOP, 8, 1)


async def test_several_choices_advance_together() -> None:
    deltas, summary = await generate(EchoTokens(), [7, 8], n=2)
    assert [(delta.index, delta.tokens) for delta in deltas] == [(0, (7,)), (1, (7,)), (0, (8,)), (1, (8,))]
    assert summary.output_tokens == 4


async def test_no_tokens_wanted_is_an_end_at_once() -> None:
    deltas, summary = await generate(EchoTokens(), [7], Stop(max_tokens=0))
    assert [(delta.tokens, delta.finish_reason) for delta in deltas] == [((), FinishReason.LENGTH)]
    assert summary.output_tokens == 0


async def test_streams_take_turns() -> None:
    engine = EchoTokens()
    order: list[str] = []

    async def stream(name: str) -> None:
        request = GenerateRequest(model="m", prompt=pack_tokens([1, 2, 3]))
        async for step in engine.generate(request, Context(name)):
            if isinstance(step, Delta):
                order.append(name)  # noqa: PERF401 - not what it was after the loop, but when

    await asyncio.gather(stream("a"), stream("b"))
    assert order == ["a", "b"] * 3


async def test_the_card_names_a_tokenizer_that_maps_any_text_to_its_bytes() -> None:
    engine = EchoTokens()
    card = await engine.start()
    assert card.llm is not None
    files = {sha256(data).hexdigest(): data for data in engine.files()}
    tokenizer = Tokenizer.from_str(files[card.llm.tokenizer].decode())
    text = "日本語 🦙 é\n\0 done"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert "messages" in files[card.llm.chat_template].decode()
