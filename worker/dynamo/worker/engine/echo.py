"""Engines that return their input, for conformance tests and benchmarks.

`EchoTensors` gives every input back as an output of the same name, without looking at the data. `EchoTokens` is a language
model of which the next token is the prompt's next token. Both are as fast as the machinery around them lets them be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import sha256

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature, check_features
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.tensors.request import TensorRequest
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from dynamo.worker.engine.base import Context, EngineLoad, TensorResponse
from dynamo.worker.engine.declaration import Declaration, Tensor

MAX_REPEATS = 10_000
MAX_DELAY_MS = 600_000
_RAISE, _MALFORMED, _MISMATCH = "raise_exception", "malformed_response", "data_mismatch"
"""Faults that requests may demand."""
CONTEXT_LENGTH = 131_072

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TENSOR = re.compile(r"(?P<name>[^=,\[\]]+)=(?P<datatype>[A-Z0-9]+)\[(?P<shape>[-0-9, ]*)\]")


def echo_declaration(
    inputs: Mapping[str, Tensor] | None = None, *, name: str = "echo", max_batch_size: int = 0, decoupled: bool = False
) -> Declaration:
    """Return a declaration whose outputs are its inputs. By default one input, `INPUT0`, FP32 of shape [-1]."""
    tensors = inputs or {"INPUT0": Tensor("FP32", [-1])}
    return Declaration(name=name, inputs=tensors, outputs=tensors, max_batch_size=max_batch_size, decoupled=decoupled)


def parse_tensors(text: str) -> dict[str, Tensor]:
    """Parse inputs from `NAME=DATATYPE[dims]`, separated by commas: `A=FP32[-1,4],B=BYTES[1]`. Raises InvalidRequest."""
    tensors: dict[str, Tensor] = {}
    position = 0
    while match := _TENSOR.match(text, position):
        dims = match["shape"].replace(" ", "")
        try:
            shape = [int(dim) for dim in dims.split(",")] if dims else []
        except ValueError:
            break
        if match["name"] in tensors:
            raise InvalidRequest(f"tensor '{match['name']}' is declared twice in {text!r}")
        tensors[match["name"]] = Tensor(match["datatype"], shape)
        position = match.end()
        if position == len(text):
            return tensors
        if text[position] != ",":
            break
        position += 1
    raise InvalidRequest(f"{text!r} is not of the form NAME=DATATYPE[dims],… (at character {position})")


class EchoTensors:
    """Responds to each request with its own inputs and parameters.

    Request parameters help tests. `delay_ms` waits before each response, and `repeat` is the number of responses (an error
    unless the model is declared as decoupled). Faults are booleans: `raise_exception`, `malformed_response` (the first tensor has
    no datatype), `data_mismatch` (it has no data).
    """

    def __init__(self, declaration: Declaration | None = None, *, name: str = "") -> None:
        """`name` replaces the declared one. Raises InvalidRequest for an output that is not an input."""
        self._declaration = declaration or echo_declaration()
        self._name = name or self._declaration.name or "echo"
        inputs = {name: (tensor.datatype, tuple(tensor.shape)) for name, tensor in self._declaration.inputs.items()}
        for name, tensor in self._declaration.outputs.items():
            if inputs.get(name) != (tensor.datatype, tuple(tensor.shape)):
                raise InvalidRequest(f"an echo model has no input equal to its output '{name}'")

    def __repr__(self) -> str:
        return f"<EchoTensors {self._name}>"

    async def start(self) -> Sequence[ModelCard]:
        return [self._declaration.to_card(self._name)]

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        repeat, delay_s = _behaviour(request.head)
        for _ in range(repeat):
            if delay_s:
                await asyncio.sleep(delay_s)
            yield _response(request)

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        repeat, delay_s = _behaviour(request.head)
        if repeat != 1:
            raise EngineError(f"parameter 'repeat' is {repeat}, but model '{self._name}' is not declared as decoupled")
        if delay_s:
            await asyncio.sleep(delay_s)
        return _response(request)

    async def close(self) -> None:
        return


def _behaviour(request: ModelInferRequest) -> tuple[int, float]:
    """Return the number of responses that a request wants, and the seconds before each."""
    if not request.parameters:
        return 1, 0.0
    return _parameter(request, "repeat", 1, MAX_REPEATS), _parameter(request, "delay_ms", 0, MAX_DELAY_MS) / 1000


def _response(request: TensorRequest) -> TensorResponse:
    """Return the inputs and parameters of a request, with the fault that it demands. Raises EngineError, InvalidRequest."""
    response = _echo(request)
    for fault in (_RAISE, _MALFORMED, _MISMATCH) if request.head.parameters else ():
        if fault in request.head.parameters and _is_true(request.head, fault):
            _spoil(response, fault)
    return response


def _spoil(response: TensorResponse, fault: str) -> None:
    if fault == _RAISE:
        raise EngineError(f"intentional exception, since the request has the parameter '{fault}'")
    if not response.head.outputs:
        raise InvalidRequest(f"parameter '{fault}' needs an input")
    if fault == _MALFORMED:
        response.head.outputs[0].datatype = ""
    elif response.raw_outputs:
        response.raw_outputs = [b"", *response.raw_outputs[1:]]
    else:
        response.head.outputs[0].ClearField("contents")


def _is_true(request: ModelInferRequest, name: str) -> bool:
    parameter = request.parameters[name]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidRequest(f"parameter '{name}' must be a boolean")
    return parameter.bool_param


def _echo(request: TensorRequest) -> TensorResponse:
    head = ModelInferResponse()
    for tensor in request.head.inputs:
        output = head.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if not request.raw_inputs:
            output.contents.CopyFrom(tensor.contents)
    if request.head.parameters:
        for key, value in request.head.parameters.items():
            head.parameters[key].CopyFrom(value)
    return TensorResponse(head, list(request.raw_inputs))


def _parameter(request: ModelInferRequest, name: str, default: int, most: int) -> int:
    if name not in request.parameters:
        return default
    parameter = request.parameters[name]
    if parameter.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
        raise InvalidRequest(f"parameter '{name}' must be an integer")
    value = parameter.uint64_param if parameter.HasField("uint64_param") else parameter.int64_param
    if not 0 <= value <= most:
        raise InvalidRequest(f"parameter '{name}' must be between 0 and {most}, got {value}")
    return value


class EchoTokens:
    """A language model that repeats the prompt, one token a step, up to `max_tokens`.

    Its tokens are the bytes of the text, so any text comes back unchanged. Without `max_tokens` it ends after one repetition. All
    streams make one step per turn of the event loop.
    """

    def __init__(self, name: str = "echo-llm", *, tokenizer: bytes | None = None) -> None:
        """`tokenizer` is a `tokenizer.json` to use instead of bytes."""
        self._name = name
        self._tokenizer = tokenizer or byte_tokenizer()
        self._running = 0

    def __repr__(self) -> str:
        return f"<EchoTokens {self._name}, running={self._running}>"

    async def start(self) -> ModelCard:
        template, tokenizer = self.files()
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            llm=LlmInfo(
                context_length=CONTEXT_LENGTH,
                tokenizer=sha256(tokenizer).hexdigest(),
                chat_template=sha256(template).hexdigest(),
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return [CHAT_TEMPLATE.encode(), self._tokenizer]

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        prompt = request.tokens
        if not prompt:
            raise InvalidRequest("the prompt has no tokens, so there is nothing to repeat")
        check_features(request, "echo", (Feature.CACHE_SALT,))
        stops = frozenset(request.stop.token_ids)
        max_tokens = request.stop.max_tokens if request.stop.max_tokens is not None else len(prompt)
        output_tokens = 0
        self._running += 1
        try:
            if max_tokens == 0:
                for index in range(request.n):
                    yield Delta(index=index, finish_reason=FinishReason.LENGTH)
            for step in range(1, max_tokens + 1):
                token = prompt[(step - 1) % len(prompt)]
                stopped = token in stops and step > request.stop.min_tokens
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH if step == max_tokens else None
                tokens = () if stopped else (token,)
                logprobs = [[(token, 0.0)]] * len(tokens) if request.logprobs is not None else None
                for index in range(request.n):
                    yield Delta(tokens, index, reason, logprobs, token if stopped else None)
                output_tokens += len(tokens) * request.n
                if reason is not None:
                    break
                await asyncio.sleep(0)  # the other streams' turn
        finally:
            self._running -= 1
        yield Summary(prompt_tokens=len(prompt), output_tokens=output_tokens)

    def load(self) -> EngineLoad:
        return EngineLoad(running=self._running)

    async def close(self) -> None:
        return


def byte_tokenizer() -> bytes:
    """Return a `tokenizer.json` with one token per byte value and no others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text.encode()
