"""A model written as a Python class: numpy arrays in, numpy arrays out.

    from dynamo.worker.engine.python import Tensor

    class Scale:
        inputs = {"x": Tensor("FP32", [-1, 4])}          # shapes count the batch dimension, as the arrays do
        outputs = {"y": Tensor("FP32", [-1, 4])}
        max_batch_size = 32                               # optional, as are: name, versions, decoupled, batching, concurrency

        def load(self) -> None: ...                       # optional; plain or async, as is close()
        def infer(self, x):                               # one argument per input; returns a dict, or the only output itself
            return {"y": 2 * x}

Instead of attributes the class may have `config`, naming a YAML or Triton `config.pbtxt` file beside it, or holding a
`Declaration` or a `ModelConfig`; or a method `declare()` that returns one of these after `load()`; or nothing, if a file of
its module's name that ends in .yaml or .pbtxt lies beside it.

`infer` may be

- a plain function: runs in a thread, one call at a time, or as many as `concurrency` allows (code that holds
  the interpreter lock gains nothing from more); with `inline = True` it runs on the event loop, for code of microseconds;
- `async`: runs on the event loop, any number at once unless `concurrency` bounds it;
- with `decoupled = True`, a plain or async generator that yields one dict per response.

An argument called `context` gets an `InferContext`. Input arrays are read-only; BYTES come as object arrays of `bytes`, BF16 as
float32. An array that was returned must not be written to afterwards: it is sent from where it lies.
To refuse a request raise `InvalidRequest`; any other exception is logged and sent as an `EngineError` with its type and text.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.process.background import awaited
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.common.tensors.check import MODELS_OWN
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import (
    DATATYPES,
    LONG_BYTES,
    Array,
    bf16_to_float32,
    bytes_array,
    element_count,
    encode_bytes_in_steps,
    from_numpy,
    takes_long_to_encode,
    to_numpy,
    typed_to_raw,
)
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from dynamo.worker.engine.base import Buffer, Context, TensorResponse
from dynamo.worker.engine.batching import Batch, Batcher, BatchPolicy, Tensors, rows_of
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.declaration import Declaration, Tensor
from dynamo.worker.engine.request_queue import QueueOptions
from dynamo.worker.engine.user_class import call_hook, declaration_of, guarded, load_class, snake_case

__all__ = ["Batching", "Declaration", "InferContext", "InvalidRequest", "PythonEngine", "Tensor"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_OWN_NAMES = {passed_as: name for name, passed_as in MODELS_OWN.items()}
"""The names that models know parameters of generate by, whose names mean something to queues."""
InputTensor = ModelInferRequest.InferInputTensor
Parameter = bool | int | str | float

_END = object()
_STEP_TIMEOUT_S = 2.0
"""How long an abandoned request waits for the present step of its generator."""


@dataclass(frozen=True, slots=True)
class InferContext:
    """What a model may know of a request besides its tensors."""

    request_id: str
    version: str
    """The requested version of the model, or the newest."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    """On the clock of `time.monotonic()`, in seconds; None: no deadline."""
    _cancelled: Callable[[], bool] = lambda: False

    @property
    def is_cancelled(self) -> bool:
        """Whether the client left or the deadline passed, so that the response is not needed. Callable from any thread."""
        return self._cancelled()


class PythonEngine:
    """Serves one user's class as one model."""

    def __init__(self, make: Callable[[], Any], *, name: str = "", file: Path | None = None) -> None:
        """`make` creates the model, in a thread; `name` replaces the declared one; `file` is the file of its class."""
        self._make = make
        self._name = name
        self._file = file
        self._model: Any = None
        self._caller: _InferCaller | None = None
        self._batcher: Batcher | None = None
        self._steps = Steps()

    def __repr__(self) -> str:
        return f"<PythonEngine of {'nothing yet' if self._caller is None else self._caller.card.name}>"

    @classmethod
    def load(cls, target: str, *, name: str = "") -> PythonEngine:
        """Return an engine for `module:Class` or `path/to/file.py:Class`. Raises InvalidRequest if there is no such class."""
        model_class, file = load_class(target)
        return cls(model_class, name=name, file=file)

    async def start(self) -> Sequence[ModelCard]:
        self._model = await asyncio.to_thread(guarded, self._make)
        await call_hook(self._model, "load")
        declaration = declaration_of(self._model, self._file)
        card = declaration.to_card(self._name or declaration.name or snake_case(type(self._model).__name__))
        self._caller = _InferCaller(self._model, card, declaration, self._steps)
        if declaration.batching is not None:
            try:
                policy = BatchPolicy(
                    max_batch_size=card.max_batch_size, batching=declaration.batching, concurrency=declaration.concurrency or 1
                )
            except ValueError as error:
                raise InvalidRequest(f"model '{card.name}': {error}") from error
            self._batcher = Batcher(policy, self._caller.call_batch)
            self._batcher.start()
        return [card]

    def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        caller = self._caller
        if caller is None:
            raise RuntimeError("the engine was not started")
        return caller.stream(request, context) if caller.card.decoupled else self._infer_one(request, context)

    async def _infer_one(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        yield await self.respond(request, context)

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        caller = self._caller
        if caller is None:
            raise RuntimeError("the engine was not started")
        timings = context.timings
        start = time.perf_counter_ns()
        inputs = await read_in_steps(request, self._steps) if has_long_bytes(request) else read_inputs(request)
        timings.input_ns = time.perf_counter_ns() - start
        if self._batcher is not None:
            options = _queue_options(request)
            outputs = await self._batcher.submit(inputs, rows_of(inputs), context, context.version, options=options)
        else:
            outputs = await caller.call(inputs, request, context)
        start = time.perf_counter_ns()
        response = await caller.to_response(outputs)
        timings.output_ns += time.perf_counter_ns() - start
        return response

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        if self._model is not None:
            await call_hook(self._model, "close")
        if self._caller is not None:
            self._caller.close()


def _queue_options(request: TensorRequest) -> QueueOptions:
    parameters = request.head.parameters
    read = {name: _value(parameters[name]) for name in ("priority", "timeout") if name in parameters} if parameters else {}
    return QueueOptions.of(request.head.id, read)


class _InferCaller:
    """Calls a user's `infer`, plain or async, in a thread or on the event loop, and checks what it returns."""

    def __init__(self, model: Any, card: ModelCard, declaration: Declaration, steps: Steps) -> None:
        self.card = card
        self._steps = steps
        self._outputs = {spec.name: spec for spec in card.outputs}
        function = getattr(model, "infer", None)
        if not callable(function):
            raise InvalidRequest(f"{type(model).__name__} has no method 'infer'")
        self._function: Callable[..., Any] = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        self._is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self._inline = bool(getattr(model, "inline", False)) or self._is_async
        if self._is_generator and not card.decoupled:
            raise InvalidRequest(f"infer of model '{card.name}' is a generator, but the model is not declared as decoupled")
        self._wants_context = self._check_signature(declaration)
        threads = 0 if self._inline else declaration.concurrency or 1
        self._pool = ThreadPoolExecutor(threads, f"model-{card.name}") if threads else None
        self._slots = asyncio.Semaphore(declaration.concurrency) if self._is_async and declaration.concurrency else None

    def _check_signature(self, declaration: Declaration) -> bool:
        """Return whether `infer` takes a context. Raises InvalidRequest if it does not take the declared inputs."""
        parameters = inspect.signature(self._function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        name = self.card.name
        for spec in self.card.inputs:
            if spec.name not in parameters and not takes_any:
                raise InvalidRequest(f"infer of model '{name}' has no argument for the input '{spec.name}'")
            if spec.optional and not takes_any and parameters[spec.name].default is inspect.Parameter.empty:
                raise InvalidRequest(f"infer of model '{name}' has no default for the optional input '{spec.name}'")
        declared = {spec.name for spec in self.card.inputs}
        for parameter in parameters.values():
            if parameter.name in declared or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.name != "context" and parameter.default is parameter.empty:
                raise InvalidRequest(
                    f"infer of model '{name}' has the argument '{parameter.name}', which is not a declared input"
                )
        wants_context = "context" in parameters and "context" not in declared
        if wants_context and declaration.batching is not None:
            raise InvalidRequest(f"infer of model '{name}' takes a context, but a dynamic batch has many requests: remove either")
        return wants_context

    async def call(self, inputs: Tensors, request: TensorRequest, context: Context) -> Tensors:
        """Run one request that has one response."""
        return await self._timed(lambda: inputs, self._extra(request, context), context)

    async def call_batch(self, batch: Batch) -> Tensors:
        """Run several requests as one."""
        start = time.perf_counter_ns()
        try:
            return self._arrays(await self._run(batch.inputs, {}))
        finally:
            batch.infer_ns = time.perf_counter_ns() - start - batch.input_ns

    async def _timed(self, inputs: Callable[[], Tensors], extra: Mapping[str, InferContext], context: Context) -> Tensors:
        timings = context.timings
        submitted = time.perf_counter_ns()
        begun = submitted

        def begin() -> Tensors:
            nonlocal begun
            begun = time.perf_counter_ns()
            return inputs()

        try:
            return self._arrays(await self._run(begin, extra))
        finally:
            timings.queue_ns += begun - submitted
            timings.infer_ns += time.perf_counter_ns() - begun

    async def _run(self, inputs: Callable[[], Tensors], extra: Mapping[str, InferContext]) -> Any:
        """Return what `infer` returns. `inputs` is called where `infer` runs, just before it."""
        if self._is_async:
            if self._slots is None:
                return await self._guarded_await(self._function(**inputs(), **extra))
            async with self._slots:
                return await self._guarded_await(self._function(**inputs(), **extra))
        return await self._in_thread(lambda: self._function(**inputs(), **extra))

    async def stream(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        """Yield the responses of a decoupled model."""
        inputs = await read_in_steps(request, self._steps) if has_long_bytes(request) else read_inputs(request)
        extra = self._extra(request, context)
        if not self._is_generator:
            yield await self.to_response(await self._timed(lambda: inputs, extra, context))
        elif self._is_async:
            responses = self._function(**inputs, **extra)
            try:
                while (item := await self._guarded_await(anext(responses, _END))) is not _END:
                    yield await self.to_response(self._arrays(item))
            finally:
                await self._guarded_await(responses.aclose())
        else:
            steps = _GeneratorSteps(self._function(**inputs, **extra))
            try:
                while (item := await self._in_thread(steps.next)) is not _END:
                    yield await self.to_response(self._arrays(item))
                    if self._pool is None:
                        await asyncio.sleep(0)  # the other requests' turn
            finally:
                await self._close_steps(steps)

    async def _close_steps(self, steps: _GeneratorSteps) -> None:
        """Close a generator, which waits for its present step, but not for a step that is stuck."""
        closing = awaited(self._in_thread(steps.close), f"closing a generator of model '{self.card.name}'")
        done, _ = await asyncio.wait({closing}, timeout=_STEP_TIMEOUT_S)
        for task in done:
            task.result()
        if not done:
            log.warning("a generator of model '%s' is stuck in a step and is left behind", self.card.name)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run a user's blocking code in the pool, or here if it is inline. Every failure is raised as a DynamoError."""
        if self._pool is None:
            return self._guarded(work)
        in_context = partial(contextvars.copy_context().run, self._guarded, work)
        return await asyncio.get_running_loop().run_in_executor(self._pool, in_context)

    def _guarded(self, work: Callable[[], T]) -> T:
        # In the thread itself, since a StopIteration or a SystemExit would not survive the way out of it.
        try:
            return work()
        except DynamoError:
            raise
        except BaseException as error:  # whatever a model raises is the failure of its request
            raise self._engine_error(error) from error

    async def _guarded_await(self, work: Any) -> Any:
        try:
            return await work
        except DynamoError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._engine_error(error) from error
        except GeneratorExit:
            raise
        except BaseException as error:
            raise self._engine_error(error) from error

    def _engine_error(self, error: BaseException) -> EngineError:
        log.error("model '%s' failed", self.card.name, exc_info=error)
        text = str(error)
        return EngineError(f"model '{self.card.name}' failed: {type(error).__name__}{f': {text}' if text else ''}")

    def _extra(self, request: TensorRequest, context: Context) -> dict[str, InferContext]:
        if not self._wants_context:
            return {}
        deadline = context.deadline
        if deadline is not None:
            deadline += time.monotonic() - asyncio.get_running_loop().time()
        parameters = {_OWN_NAMES.get(name, name): _value(parameter) for name, parameter in request.head.parameters.items()}
        return {"context": InferContext(context.request_id, context.version, parameters, deadline, context.cancelled.is_set)}

    def _arrays(self, result: Any) -> dict[str, Array]:
        """Return the outputs of `infer` as arrays by name. Raises EngineError if they are not as declared."""
        if not isinstance(result, Mapping):
            if len(self._outputs) != 1 or result is None:
                raise self._broken(f"gave a {type(result).__name__} instead of a dict of its outputs")
            result = {next(iter(self._outputs)): result}
        arrays = {}
        for name, value in result.items():
            spec = self._outputs.get(name)
            if spec is None:
                raise self._broken(f"gave the output '{name}', which it does not declare")
            arrays[name] = self._array(spec, value)
        for name, spec in self._outputs.items():
            if name not in arrays and not spec.optional:
                raise self._broken(f"did not give its output '{name}'")
        return arrays

    def _array(self, spec: TensorSpec, value: Any) -> Array:
        if not isinstance(value, np.ndarray | np.generic):
            dtype = np.dtype(np.float32) if spec.datatype == "BF16" else DATATYPES[spec.datatype].dtype
            try:
                value = np.asarray(value, dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise self._broken(f"gave an output '{spec.name}' that is no {spec.datatype} tensor: {error}") from error
        array = np.asarray(value)
        fits = array.ndim == len(spec.shape) and all(
            want in (-1, have) for want, have in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            raise self._broken(f"gave the output '{spec.name}' in shape {list(array.shape)}; it declares {list(spec.shape)}")
        return array

    async def to_response(self, arrays: Tensors) -> TensorResponse:
        """Return a response with `arrays`. Other requests go on while large ones are encoded."""
        head = ModelInferResponse()
        raws: list[Buffer] = []
        for name, array in arrays.items():
            try:
                if array.nbytes > LONG_BYTES and takes_long_to_encode(array, self._outputs[name].datatype):
                    datatype, raw = await encode_long(array, self._outputs[name].datatype, self._steps)
                else:
                    datatype, raw = from_numpy(array, self._outputs[name].datatype)
            except InvalidRequest as error:
                raise self._broken(f"gave a wrong output '{name}': {error}") from error
            head.outputs.add(name=name, datatype=datatype, shape=array.shape)
            raws.append(raw)
        return TensorResponse(head, raws)

    def _broken(self, what: str) -> EngineError:
        message = f"model '{self.card.name}' {what}"
        log.error("%s", message)
        return EngineError(message)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class _GeneratorSteps:
    """A generator that is stepped in threads. Closing waits for the step that runs."""

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator = generator
        self._running = threading.Lock()

    def next(self) -> Any:
        with self._running:
            return next(self._generator, _END)

    def close(self) -> None:
        with self._running:
            close = getattr(self._generator, "close", None)
            if close is not None:
                close()


def read_inputs(
    request: TensorRequest, *, aligned: bool = True, decoded: Mapping[str, Array] = MappingProxyType({})
) -> dict[str, Array]:
    """Return a request's tensors as arrays by name, read-only and without a copy where possible. Raises InvalidRequest.

    `aligned`: whether unaligned arrays are copied, since many libraries take aligned memory only. `decoded`: those that
    were decoded before.
    """
    arrays = {}
    raws = request.raw_inputs
    if raws and len(raws) != len(request.head.inputs):
        raise InvalidRequest(f"raw_input_contents has {len(raws)} entries for {len(request.head.inputs)} inputs")
    for index, tensor in enumerate(request.head.inputs):
        if tensor.name in decoded:
            arrays[tensor.name] = decoded[tensor.name]
            continue
        what = f"input '{tensor.name}'"
        typed = b"" if raws else typed_to_raw(tensor.contents, tensor.datatype, element_count(tensor.shape, what), what)
        array = to_numpy(raws[index] if raws else typed, tensor.datatype, tuple(tensor.shape), what)
        if tensor.datatype == "BF16":
            array = bf16_to_float32(array)
        elif aligned and not array.flags.aligned:
            array = array.copy()
        arrays[tensor.name] = array
    return arrays


async def encode_long(array: Array, datatype: str, steps: Steps) -> tuple[str, Buffer]:
    """Do the same as `from_numpy` for an array that takes long; other requests go on beside it."""
    if array.dtype.kind in "OSU":
        return await steps.run(encode_bytes_in_steps(array, datatype))
    return await asyncio.to_thread(from_numpy, array, datatype)  # numpy leaves the interpreter while it copies numbers


def has_long_bytes(request: TensorRequest) -> bool:
    """Return whether the tensors of a request should be read by `read_in_steps`."""
    return len(request.raw) > LONG_BYTES and any(
        _is_long(*pair) for pair in zip(request.head.inputs, request.raw_inputs, strict=False)
    )


async def read_in_steps(request: TensorRequest, steps: Steps, *, aligned: bool = True) -> dict[str, Array]:
    """Do the same as `read_inputs`; other requests go on beside it."""
    return await steps.run(_read(request, aligned=aligned))


def _read(request: TensorRequest, *, aligned: bool) -> Work[dict[str, Array]]:
    decoded = {}
    for tensor, raw in zip(request.head.inputs, request.raw_inputs, strict=False):  # `read_inputs` counts them
        if _is_long(tensor, raw):
            what = f"input '{tensor.name}'"
            array = yield from bytes_array(raw, element_count(tensor.shape, what), what)
            decoded[tensor.name] = array.reshape(tuple(tensor.shape))
    return read_inputs(request, aligned=aligned, decoded=decoded)


def _is_long(tensor: InputTensor, raw: Buffer) -> bool:
    return tensor.datatype == "BYTES" and len(raw) > LONG_BYTES


def _value(parameter: InferParameter) -> Parameter:
    value: Parameter = getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")
    return value
