"""Models that a library runs as one function of arrays: the backends `onnxruntime`, `pytorch`, `openvino` and `tensorrt`.

A library takes part by a `Session`. All instances of a version share one, whose `run` is called from several threads; their
number is how many run at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from dynamo.common.errors import Cancelled, DynamoError, EngineError, InvalidRequest
from dynamo.common.tensors.tensors import DATATYPES, Array
from dynamo.protos.model_config_pb2 import BatchInput, ModelConfig, ModelInput, ModelOutput
from dynamo.worker.engine.batching import Batch, Tensors
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import Arrays, ModelRequest, ModelResult, Version
from dynamo.worker.repository.declared.model_config import datatype_name, instances_of, model_dims
from dynamo.worker.repository.declared.ragged import RaggedBatches, batch_inputs, ragged_inputs
from dynamo.worker.repository.declared.sequence_batching import added_tensors
from dynamo.worker.repository.scheduling.rate_limiter import RateLimiter, limits_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionTensor:
    """An input or output of a model as the model itself declares it."""

    name: str
    type: str
    """The library's name of its type."""
    datatype: str | None
    """KServe's name of the type; None: there is none."""
    dims: tuple[int, ...]
    """-1: any size. Empty: also if the model does not say."""


@dataclass(frozen=True, slots=True)
class Signature:
    inputs: Sequence[SessionTensor]
    outputs: Sequence[SessionTensor]


class Session(Protocol):
    """One version of a model in a library."""

    @property
    def signature(self) -> Signature | None:
        """What the model says of its tensors; None: nothing."""
        ...

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        """Return these outputs. BYTES are object arrays of `bytes`, BF16 is float32.

        Raises DynamoError; any other error means that the model failed.
        """
        ...


class SessionBackend:
    """Loads models of one library. `default_max_batch_size` is for models that can batch and whose configuration has no size."""

    def __init__(
        self, open_session: Callable[[Version], Session], default_max_batch_size: int, limiter: RateLimiter | None = None
    ) -> None:
        """`open_session` blocks. It raises InvalidRequest for a model that cannot be loaded."""
        self._open_session = open_session
        self._default_max_batch_size = default_max_batch_size
        self._limiter = limiter

    async def complete(self, version: Version) -> ModelConfig:
        session = await asyncio.to_thread(self._open_session, version)
        if session.signature is None:
            return version.config
        return complete_config(version.config, session.signature, self._default_max_batch_size)

    async def open_instances(self, version: Version) -> Sequence[SessionModel]:
        model = await self.open(version)
        return [model for _ in instances_of(version.config)]

    async def open(self, version: Version) -> SessionModel:
        session = await asyncio.to_thread(self._open_session, version)
        if session.signature is not None:
            _check(version.config, session.signature)
        return SessionModel(version, session, self._limiter)


class SessionModel:
    """One version of a model."""

    processes: Sequence[object] = ()
    """Always empty: threads of this process run the model."""

    def __init__(self, version: Version, session: Session, limiter: RateLimiter | None) -> None:
        """Raises InvalidRequest if an instance needs more of a resource than there is."""
        self._name = version.name
        self._config = version.config
        self._session = session
        ragged = RaggedBatches(version.config)
        self._ragged = ragged if ragged.is_used else None
        self._ragged_inputs = ragged_inputs(version.config)
        self._outputs = sorted({output.name for output in version.config.output} | added_tensors(version.config)[1])
        instances = list(instances_of(version.config))
        self._limits = limits_of(limiter, instances)
        self._threads = len(instances)
        self._executions = 0
        """In the pool, or waiting for a thread of it."""
        self._pool = ThreadPoolExecutor(self._threads, f"model-{version.name}")

    def __repr__(self) -> str:
        return f"<SessionModel {self._name}>"

    @property
    def waiting(self) -> int:
        return self._limits.waiting + max(0, self._executions - self._threads)

    async def close(self) -> None:
        self._pool.shutdown(wait=False)
        self._limits.close()

    async def respond(self, request: ModelRequest) -> ModelResult:
        submitted = begun = time.perf_counter_ns()

        def run() -> Arrays:
            nonlocal begun
            begun = time.perf_counter_ns()
            return self._run_alone(request.inputs)

        try:
            return ModelResult(await self._in_pool(run))
        finally:
            request.context.timings.queue_ns += begun - submitted
            request.context.timings.infer_ns += time.perf_counter_ns() - begun

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        """Run requests of one row each as one batch, or one by one if they cannot be joined, or if that fails."""
        inputs = [request.inputs for request in requests]
        if len({self._form(each) for each in inputs}) == 1:
            try:
                return [ModelResult(outputs) for outputs in await self._in_pool(partial(self._run_rows, inputs))]
            except DynamoError:
                if len(inputs) == 1:
                    raise
        return [await self._result(each) for each in inputs]

    async def _result(self, inputs: Arrays) -> ModelResult | DynamoError:
        try:
            return ModelResult(await self._in_pool(partial(self._run_alone, inputs)))
        except DynamoError as error:
            return error

    def _form(self, inputs: Arrays) -> Hashable:
        """Return what must agree in the requests of a batch."""
        return frozenset((name, () if name in self._ragged_inputs else array.shape) for name, array in inputs.items())

    def _run_rows(self, requests: Sequence[Arrays]) -> list[Arrays]:
        if self._ragged is not None:
            return self._run_joined(self._ragged, requests)
        if len(requests) == 1:
            return [self._run(requests[0])]
        outputs = self._run({name: np.concatenate([inputs[name] for inputs in requests]) for name in requests[0]})
        return [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(requests))]

    async def _in_pool(self, run: Callable[[], T]) -> T:
        give_back = await self._limits.take()
        loop = asyncio.get_running_loop()

        def ended() -> None:
            self._executions -= 1
            give_back()

        def end(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended before the thread
                loop.call_soon_threadsafe(ended)

        self._executions += 1
        execution = self._pool.submit(run)
        execution.add_done_callback(end)  # a thread runs on when the caller leaves
        return await asyncio.wrap_future(execution)

    async def run_batch(self, batch: Batch) -> Tensors | list[Any]:
        submitted = begun = time.perf_counter_ns()

        def run() -> Tensors | list[Any]:
            nonlocal begun
            begun = time.perf_counter_ns()
            if batch.is_abandoned:  # while it waited for an instance
                raise Cancelled()
            if self._ragged is not None:
                return [*self._run_joined(self._ragged, [request.inputs for request in batch.requests])]
            outputs = self._run(batch.inputs())
            return outputs if self._config.max_batch_size else [outputs]

        try:
            return await self._in_pool(run)
        finally:
            batch.queue_ns = begun - submitted
            batch.infer_ns = time.perf_counter_ns() - begun - batch.input_ns

    def _run_alone(self, inputs: Arrays) -> Arrays:
        return self._run(inputs) if self._ragged is None else self._run_joined(self._ragged, [inputs])[0]

    def _run_joined(self, ragged: RaggedBatches, requests: Sequence[Arrays]) -> list[Arrays]:
        return ragged.split(self._run(ragged.join(requests)), requests)

    def _run(self, inputs: Arrays) -> Tensors:
        try:
            outputs = self._session.run(self._outputs, inputs)
        except DynamoError:
            raise
        except Exception as error:
            raise EngineError(f"model '{self._name}' failed: {first_line(error)}") from error
        return dict(zip(self._outputs, outputs, strict=True))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def model_file(version: Version, default: str) -> Path:
    """Return the file of a version, by default the one named `default`. Raises InvalidRequest if it is not there."""
    file = version.path / relative_path(version.config.default_model_filename or default)
    if not file.exists():
        raise InvalidRequest(f"there is no file {version.version}/{file.name}")
    return file


def number_parameter(config: ModelConfig, name: str) -> int | None:
    """Return a parameter of a model as a number; None if there is none. Raises InvalidRequest."""
    if name not in config.parameters:
        return None
    text = config.parameters[name].string_value
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"the parameter {name} is {text[:40]!r}, which is not a number") from None


# Completing and checking configurations by the model's file


def complete_config(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> ModelConfig:
    """Return `config`, completed with what the model declares. Settings of the configuration stay. Raises InvalidRequest.

    A model whose configuration has no batch size, and whose tensors all begin with a dimension of any size, batches dynamically.
    """
    inputs, outputs = signature.inputs, signature.outputs
    completed = ModelConfig()
    completed.CopyFrom(config)
    declared = bool(config.input or config.output)
    if not declared and not config.max_batch_size and default_max_batch_size and _can_batch((*inputs, *outputs)):
        completed.max_batch_size = default_max_batch_size
    if completed.max_batch_size > 1 and not declared and completed.WhichOneof("scheduling_choice") is None:
        completed.dynamic_batching.SetInParent()
    batch_dims = 1 if completed.max_batch_size else 0
    inputs_by_name = {tensor.name: tensor for tensor in completed.input}
    outputs_by_name = {tensor.name: tensor for tensor in completed.output}
    added_inputs, added_outputs = added_tensors(completed)
    inputs = [node for node in inputs if node.name not in added_inputs | batch_inputs(completed).keys()]
    outputs = [node for node in outputs if node.name not in added_outputs]
    for node in inputs:
        _complete(inputs_by_name.get(node.name) or completed.input.add(name=node.name), node, batch_dims)
    if not completed.output:
        for node in outputs:
            completed.output.add(name=node.name)
        outputs_by_name = {tensor.name: tensor for tensor in completed.output}
    for node in outputs:
        if node.name in outputs_by_name:
            _complete(outputs_by_name[node.name], node, batch_dims)
    return completed


def _can_batch(nodes: Sequence[SessionTensor]) -> bool:
    return all(len(node.dims) > 0 and node.dims[0] == -1 for node in nodes)


def _complete(tensor: ModelInput | ModelOutput, node: SessionTensor, batch_dims: int) -> None:
    if not tensor.data_type:
        tensor.data_type = DATATYPES[_datatype(node)].config_type  # type: ignore[assignment]
    if not tensor.dims:
        is_ragged = isinstance(tensor, ModelInput) and tensor.allow_ragged_batch
        tensor.dims.extend((-1,) if is_ragged else node.dims[batch_dims:])


def _datatype(node: SessionTensor) -> str:
    if node.datatype is None:
        raise InvalidRequest(f"tensor '{node.name}' is {node.type}, which is not supported")
    return node.datatype


def _check(config: ModelConfig, signature: Signature) -> None:
    """Raises InvalidRequest if the configuration does not match the model."""
    inputs = {node.name: node for node in signature.inputs}
    outputs = {node.name: node for node in signature.outputs}
    scattered = {target for batch_output in config.batch_output for target in batch_output.target_name}
    for what, declared, actual in (("input", config.input, inputs), ("output", config.output, outputs)):
        for tensor in declared:
            if tensor.name not in actual:
                raise InvalidRequest(f"the model has no {what} '{tensor.name}'; it has {', '.join(sorted(actual))}")
            is_ragged = tensor.name in scattered or (isinstance(tensor, ModelInput) and tensor.allow_ragged_batch)
            dims = (-1,) if is_ragged else (*((-1,) if config.max_batch_size else ()), *model_dims(tensor))
            _check_tensor(what, tensor, actual[tensor.name], dims, is_batched=bool(config.max_batch_size))
    for name, batch_input in batch_inputs(config).items():
        if name not in inputs:
            raise InvalidRequest(f"batch_input names the input '{name}', which the model does not have")
        rank = 2 if batch_input.kind == BatchInput.BATCH_ITEM_SHAPE else 1
        _check_tensor("batch_input", ModelInput(name=name, data_type=batch_input.data_type), inputs[name], (-1,) * rank)
    added_inputs, added_outputs = added_tensors(config)
    for what, names, actual in (("input", added_inputs, inputs), ("output", added_outputs, outputs)):
        if unknown := sorted(names - actual.keys()):
            raise InvalidRequest(f"sequence_batching names the {what} '{unknown[0]}', which the model does not have")
    declared_inputs = {tensor.name for tensor in config.input} | added_inputs | batch_inputs(config).keys()
    if missing := sorted(inputs.keys() - declared_inputs):
        raise InvalidRequest(f"the configuration lacks the input '{missing[0]}' of the model")


def _check_tensor(
    what: str, tensor: ModelInput | ModelOutput, node: SessionTensor, dims: tuple[int, ...], *, is_batched: bool = False
) -> None:
    """Raises InvalidRequest unless the model has the tensor in this shape."""
    datatype = datatype_name(tensor)
    if datatype != _datatype(node):
        raise InvalidRequest(f"{what} '{tensor.name}' is declared as {datatype}; the model has {_datatype(node)}")
    actual = node.dims
    fits = len(dims) == len(actual) and all(-1 in (one, other) or one == other for one, other in zip(dims, actual, strict=True))
    if actual and (not fits or (is_batched and actual[0] not in (-1,))):
        batch = " with the batch dimension in front" if is_batched else ""
        raise InvalidRequest(f"{what} '{tensor.name}' is declared in shape {list(dims)}{batch}; the model has {list(actual)}")
