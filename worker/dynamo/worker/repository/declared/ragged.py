"""Ragged batches, as Triton's backends make them: requests whose tensors differ in shape run together.

A model gets an input with `allow_ragged_batch` as the elements of all requests in one dimension. `batch_input` tells it which
belong to which request, and `batch_output` cuts an output of one dimension into the shapes of an input.

Models of the Python backend get each request's tensors as they are, and none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import TYPE_FP32, TYPE_INT32, BatchInput, ModelConfig
from dynamo.worker.repository.declared.execution import Arrays
from dynamo.worker.repository.declared.model_config import model_dims


def ragged_inputs(config: ModelConfig) -> frozenset[str]:
    """Return the names of the inputs that requests of one batch may have in different shapes."""
    return frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)


def batch_inputs(config: ModelConfig) -> dict[str, BatchInput]:
    """Return the inputs that a model has beside those of clients, by name."""
    return {target: batch_input for batch_input in config.batch_input for target in batch_input.target_name}


def ragged_problems(config: ModelConfig) -> Iterator[str]:
    """Yield what Triton, too, refuses in `batch_input` and `batch_output`."""
    inputs, outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    for batch_input in config.batch_input:
        yield from _source_problems("batch_input", batch_input.source_input, inputs)
        if batch_input.data_type not in (TYPE_INT32, TYPE_FP32):
            yield "batch_input.data_type must be TYPE_INT32 or TYPE_FP32"
        for target in sorted(inputs & set(batch_input.target_name)):
            yield f"batch_input.target_name must not be an input of requests, got '{target}'"
    for batch_output in config.batch_output:
        yield from _source_problems("batch_output", batch_output.source_input, inputs)
        for target in batch_output.target_name:
            if target not in outputs:
                yield f"batch_output.target_name must be an output, got '{target}'"
    targets = [target for batch_output in config.batch_output for target in batch_output.target_name]
    if len(set(targets)) < len(targets):
        yield "batch_output.target_name must name each output once"
    if not config.max_batch_size and (config.batch_input or config.batch_output):
        yield "batch_input and batch_output need a max_batch_size of at least 1"


def _source_problems(field: str, sources: Sequence[str], inputs: set[str]) -> Iterator[str]:
    if len(sources) != 1:
        yield f"{field}.source_input must name one input, got {len(sources)}"
    for source in sources:
        if source not in inputs:
            yield f"{field}.source_input must be an input, got '{source}'"


@dataclass(frozen=True, slots=True)
class _Scattered:
    """How an output is cut: each request's part has these sizes, where -1 is the size of `source` in the same dimension."""

    source: str
    sizes: tuple[int, ...]

    def shape(self, inputs: Arrays) -> tuple[int, ...]:
        source = inputs[self.source].shape
        return tuple(source[dimension] if size == -1 else size for dimension, size in enumerate(self.sizes))


class RaggedBatches:
    """Joins the inputs of requests for a model, and splits its outputs."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises InvalidRequest for an output that has more dimensions than the input that gives its shape."""
        self._ragged = ragged_inputs(config)
        self._batch_inputs = batch_inputs(config)
        dims = {tensor.name: (-1, *model_dims(tensor)) for tensor in config.output}
        self._scattered = {
            target: _Scattered(batch_output.source_input[0], dims[target])
            for batch_output in config.batch_output
            for target in batch_output.target_name
        }
        ranks = {tensor.name: 1 + len(model_dims(tensor)) for tensor in config.input}
        for name, scattered in self._scattered.items():
            if any(size == -1 for size in scattered.sizes[ranks[scattered.source] :]):
                raise InvalidRequest(f"batch_output: output '{name}' has more dimensions than the input '{scattered.source}'")

    @property
    def is_used(self) -> bool:
        return bool(self._ragged or self._batch_inputs or self._scattered)

    def join(self, requests: Sequence[Arrays]) -> Arrays:
        """Return the inputs of the model for the inputs of requests."""
        joined: dict[str, Array] = {}
        for name in requests[0]:
            arrays = [inputs[name].reshape(-1) if name in self._ragged else inputs[name] for inputs in requests]
            joined[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        for name, batch_input in self._batch_inputs.items():
            dtype = np.int32 if batch_input.data_type == TYPE_INT32 else np.float32
            shapes = [inputs[batch_input.source_input[0]].shape for inputs in requests]
            joined[name] = np.asarray(_batch_values(batch_input, shapes), dtype)
        return joined

    def split(self, outputs: Mapping[str, Array], requests: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of each request. Raises EngineError if the model gave more or less than the requests need."""
        rows = [next(iter(inputs.values())).shape[0] for inputs in requests]
        parts: list[dict[str, Array]] = [{} for _ in requests]
        for name, array in outputs.items():
            scattered = self._scattered.get(name)
            if scattered is None:
                _check_size(name, array.shape[0] if array.ndim else 0, sum(rows), "rows")
                pieces = np.split(array, np.cumsum(rows)[:-1])
            else:
                shapes = [scattered.shape(inputs) for inputs in requests]
                sizes = [prod(shape) for shape in shapes]
                _check_size(name, array.size, sum(sizes), "elements")
                flat = np.split(array.reshape(-1), np.cumsum(sizes)[:-1])
                pieces = [piece.reshape(shape) for piece, shape in zip(flat, shapes, strict=True)]
            for part, piece in zip(parts, pieces, strict=True):
                part[name] = piece
        return [*parts]


def _batch_values(batch_input: BatchInput, shapes: Sequence[tuple[int, ...]]) -> Array:
    """Return the values of a batch input; `shapes` are those of its source in the requests."""
    counts = np.array([prod(shape) for shape in shapes])
    match batch_input.kind:
        case BatchInput.BATCH_ELEMENT_COUNT:
            return counts
        case BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT:
            return np.cumsum(counts)
        case BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return np.concatenate(([0], np.cumsum(counts)))
        case BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(counts.max())
        case _:
            items = np.repeat([shape[1:] for shape in shapes], [shape[0] for shape in shapes], axis=0)
            return items if batch_input.kind == BatchInput.BATCH_ITEM_SHAPE else items.reshape(-1)


def _check_size(name: str, actual: int, needed: int, what: str) -> None:
    if actual != needed:
        raise EngineError(f"output '{name}' has {actual} {what}; the requests of the batch need {needed}")
