"""Engines around the handlers of NVIDIA Dynamo's workers, which take and yield dictionaries."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature, check_features
from dynamo.common.model_card import TAKES_TEXT, LlmInfo, ModelCard, ModelKind
from dynamo.common.tensors.tensors import DATATYPES, Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.compat.models import ModelInput, RegisteredModel
from dynamo.worker.engine.base import Context as RequestContext
from dynamo.worker.engine.base import Engine, EngineLoad, TensorEngine
from dynamo.worker.engine.declaration import Declaration, Tensor, from_model_config
from dynamo.worker.engine.open_requests import OpenRequests
from dynamo.worker.engine.python import InferContext, PythonEngine
from dynamo.worker.engine.remote.text import TextDialect
from dynamo.worker.engine.sampling import sampling_fields
from dynamo.worker.tokenizers.folder import TextFiles, read_folder

log = logging.getLogger(__name__)

Handler = Callable[..., AsyncIterator[Any]]
"""A worker's async generator of a request and, unless it leaves it out, a `Context`."""
Call = Callable[[Any, RequestContext], AsyncIterator[Any]]

_DEFAULT_CONTEXT = 4096
_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_DATATYPES = {
    "Bool": "BOOL",
    **{f"{sign}int{bits}".capitalize(): f"{sign}int{bits}".upper() for sign in ("u", "") for bits in (8, 16, 32, 64)},
    "Float32": "FP32",
    "Float64": "FP64",
    "Bytes": "BYTES",
}
_NAMES = {datatype: name for name, datatype in _DATATYPES.items()}


class Context:
    """One request, as handlers see it."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def id(self) -> str:
        return self._context.request_id

    def is_stopped(self) -> bool:
        return self._context.is_cancelled

    def is_killed(self) -> bool:
        return self._context.is_cancelled

    async def async_killed_or_stopped(self) -> bool:
        return await self._context.cancelled.wait()


def make_engine(model: RegisteredModel, handler: Handler) -> Engine | TensorEngine:
    """Return an engine for what a worker registered. Raises InvalidRequest for a model that cannot be served."""
    call = _bound(handler)
    match model.input:
        case ModelInput.Text:
            return TextHandler(model, call)
        case ModelInput.Tokens:
            return TokensHandler(model, call)
        case ModelInput.Tensor:
            declaration = _declaration(model)
            made = (AnyResponses if declaration.decoupled else OneResponse)(model, declaration, call)
            return PythonEngine(lambda: made, name=model.name)


def _bound(handler: Handler) -> Callable[[Any, RequestContext], AsyncIterator[Any]]:
    """Return how to call `handler`, which may leave out the context."""
    parameters = inspect.signature(handler).parameters
    if len(parameters) < 2:
        return lambda request, context: handler(request)
    return lambda request, context: handler(request, Context(context))


class _Handler:
    """What handlers of language models share."""

    def __init__(self, model: RegisteredModel, call: Call) -> None:
        self.model = model
        self._call = call
        self._requests = OpenRequests()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model.name}, open={self._requests.choices}>"

    def card(self, info: LlmInfo) -> ModelCard:
        model = self.model
        info = msgspec.structs.replace(info, tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser)
        return ModelCard(name=model.name, kind=ModelKind.LLM, aliases=model.aliases, llm=info).check()

    async def items(self, request: Mapping[str, Any], context: RequestContext) -> AsyncIterator[Any]:
        """Yield what the handler yields. Raises EngineError for an error of the handler."""
        try:
            async with aclosing(cast(Any, self._call(request, context))) as items:
                async for item in items:
                    yield item
        except DynamoError:
            raise
        except Exception as error:
            log.exception("model '%s' failed", self.model.name)
            raise EngineError(f"model '{self.model.name}' failed: {type(error).__name__}: {error}") from error

    def load(self) -> EngineLoad:
        return EngineLoad(running=self._requests.choices, queued_prefill_tokens=self._requests.prefilling_tokens)

    async def close(self) -> None:
        """Nothing to free: the worker's own code does it."""


class TextHandler(_Handler):
    """`ModelInput.Text`: requests as OpenAI has them, and its chunks, or plain texts."""

    async def start(self) -> ModelCard:
        return self.card(LlmInfo(context_length=self.model.context_length or 0, tokenizer=TAKES_TEXT))

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncIterator[Delta | Summary]:
        dialect = TextDialect(self.model.name)
        _, body = dialect.call(request)
        reader = dialect.reader(request)
        with self._requests.opened(request) as opened:
            async with aclosing(cast(Any, self.items(msgspec.json.decode(body), context))) as items:
                async for item in items:
                    opened.prefilled()
                    for delta in [Delta(text=item)] if isinstance(item, str) else reader.read(msgspec.json.encode(item)):
                        opened.generated(delta)
                        yield delta
        for index in reader.unfinished:
            yield Delta(index=index, finish_reason=FinishReason.STOP)
        yield reader.summary()


class TokensHandler(_Handler):
    """`ModelInput.Tokens`: token ids in both directions; tokenizer and template are those of the folder `model_path`."""

    def __init__(self, model: RegisteredModel, call: Call) -> None:
        super().__init__(model, call)
        self._text: TextFiles = read_folder(Path(model.path))

    async def start(self) -> ModelCard:
        text = self._text
        return self.card(
            LlmInfo(
                context_length=self.model.context_length or _context_length(Path(self.model.path)),
                tokenizer=sha256(text.tokenizer).hexdigest(),
                chat_template=sha256(text.chat_template).hexdigest() if text.chat_template else "",
                bos_token=text.bos_token,
                eos_token=text.eos_token,
                eos_token_ids=text.eos_token_ids,
            )
        )

    def files(self) -> Sequence[bytes]:
        return [file for file in (self._text.tokenizer, self._text.chat_template) if file]

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncIterator[Delta | Summary]:
        _check(request, self.model.name)
        reason, count = None, 0
        with self._requests.opened(request) as opened:
            async with aclosing(cast(Any, self.items(_tokens_request(request, self._text), context))) as items:
                async for item in items:
                    opened.prefilled()
                    tokens = tuple(item.get("token_ids") or ())
                    reason = _finish_reason(item.get("finish_reason"))
                    count += len(tokens)
                    yield Delta(tokens, finish_reason=reason)
                    if reason is not None:
                        break
        if reason is None:
            yield Delta(finish_reason=FinishReason.STOP)
        yield Summary(prompt_tokens=request.prompt_tokens, output_tokens=count)


def _check(request: GenerateRequest, model: str) -> None:
    """Raises InvalidRequest for what a handler of tokens does not get, or cannot yield."""
    check_features(request, "compat", (Feature.GUIDED, Feature.CACHE_SALT))
    if request.n > 1:
        raise InvalidRequest(f"n must be 1 for model '{model}', got {request.n}", param="n")
    if request.logprobs is not None:
        raise InvalidRequest(f"model '{model}' has no log probabilities", param="logprobs")


def _context_length(folder: Path) -> int:
    """Return what the model's configuration says."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return _DEFAULT_CONTEXT
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) else _DEFAULT_CONTEXT


def _tokens_request(request: GenerateRequest, text: TextFiles) -> dict[str, Any]:
    """Return what Dynamo calls a preprocessed request."""
    stop, sampling = request.stop, request.sampling
    return {
        "model": request.model,
        "token_ids": request.tokens.tolist(),
        "stop_conditions": {
            "max_tokens": stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop": None,  # frontends match stop strings
            "stop_token_ids_hidden": [*stop.token_ids],
            "ignore_eos": stop.ignore_eos,
        },
        "sampling_options": {
            "n": request.n,
            **sampling_fields(sampling),
            "seed": sampling.seed,
            "guided_decoding": sampling.guided,
        },
        "output_options": {"logprobs": None, "prompt_logprobs": None},
        "eos_token_ids": [*text.eos_token_ids],
        "annotations": [],
    }


def _finish_reason(reason: Any) -> FinishReason | None:
    """Raises EngineError for an error, Unavailable for a request that the engine gave up."""
    if reason is None:
        return None
    if isinstance(reason, Mapping):  # {"error": "…"}
        raise EngineError(str(reason.get("error", reason)))
    if reason == "cancelled":
        raise Unavailable("the engine gave the request up")
    if reason not in _REASONS:
        raise EngineError(f"the engine ended with {reason!r:.200}")
    return _REASONS[reason]


# Tensors


class _Tensors:
    """`ModelInput.Tensor` as a model for `PythonEngine`."""

    def __init__(self, model: RegisteredModel, declaration: Declaration, call: Call) -> None:
        self.model = model
        self._declaration = declaration
        self._call = call

    def declare(self) -> Declaration:
        return self._declaration

    async def responses(self, context: InferContext, inputs: Mapping[str, Array]) -> AsyncGenerator[dict[str, Array], None]:
        datatypes = {name: tensor.datatype for name, tensor in self._declaration.inputs.items()}
        request = {
            "id": context.request_id,
            "model": self.model.name,
            "tensors": [_to_tensor(name, datatypes[name], array) for name, array in inputs.items()],
            "parameters": dict(context.parameters),
        }
        call = RequestContext(context.request_id)
        async with aclosing(cast(Any, self._call(request, call))) as responses:
            try:
                async for response in responses:
                    yield {tensor["metadata"]["name"]: _from_tensor(tensor) for tensor in response["tensors"]}
            except (asyncio.CancelledError, GeneratorExit):
                call.cancelled.set()
                raise


class OneResponse(_Tensors):
    """A model with one response for each request."""

    async def infer(self, context: InferContext, **inputs: Array) -> dict[str, Array]:
        async with aclosing(self.responses(context, inputs)) as responses:
            async for response in responses:
                return response
        raise EngineError(f"model '{self.model.name}' did not respond")


class AnyResponses(_Tensors):
    """A decoupled model."""

    async def infer(self, context: InferContext, **inputs: Array) -> AsyncIterator[dict[str, Array]]:
        async with aclosing(self.responses(context, inputs)) as responses:
            async for response in responses:
                yield response


def _declaration(model: RegisteredModel) -> Declaration:
    """Raises InvalidRequest for a model without a description of its tensors."""
    config = model.tensors
    if config is None:
        raise InvalidRequest(f"model '{model.name}' of tensors needs a 'tensor_model_config'")
    if serialized := config.get("triton_model_config"):
        return from_model_config(ModelConfig.FromString(bytes(serialized)), Path(model.path).parent)
    inputs, outputs = (
        {spec["name"]: Tensor(_datatype(spec["data_type"]), spec["shape"]) for spec in config.get(side) or ()}
        for side in ("inputs", "outputs")
    )
    return Declaration(name=model.name, inputs=inputs, outputs=outputs)


def _datatype(name: str) -> str:
    if name not in _DATATYPES:
        raise InvalidRequest(f"a tensor has the data_type {name!r:.40}; expected one of {', '.join(_DATATYPES)}")
    return _DATATYPES[name]


def _to_tensor(name: str, datatype: str, array: Array) -> dict[str, Any]:
    values = array.ravel().tolist()
    if datatype == "BYTES":
        values = [[*value] for value in values]
    kind = _NAMES.get(datatype)
    if kind is None:
        raise InvalidRequest(f"the input '{name}' is {datatype}, which Dynamo does not have")
    metadata = {"name": name, "data_type": kind, "shape": [*array.shape], "parameters": {}}
    return {"metadata": metadata, "data": {"data_type": kind, "values": values}}


def _from_tensor(tensor: Mapping[str, Any]) -> Array:
    metadata, data = tensor["metadata"], tensor["data"]
    datatype = _datatype(metadata["data_type"])
    values = data["values"] if isinstance(data, Mapping) else data
    if datatype == "BYTES":
        array = np.empty(len(values), object)
        array[:] = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
    else:
        array = np.asarray(values, DATATYPES[datatype].dtype)
    return array.reshape(metadata["shape"])
