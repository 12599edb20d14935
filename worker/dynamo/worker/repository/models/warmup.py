"""Requests that are sent to a model before it becomes ready, as its configuration declares (`model_warmup`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.tensors.tensors import Array, bf16_to_float32, datatype_of_config, element_count, to_numpy
from dynamo.protos.model_config_pb2 import ModelConfig, ModelWarmup
from dynamo.worker.engine.base import Context
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import ModelRequest, Parameter, closing
from dynamo.worker.repository.declared.sequence_batching import added_tensors
from dynamo.worker.repository.models.loaded import LoadedModel, WarmUp

FOLDER = "warmup"
MAX_REQUESTS = 10_000
MAX_BYTES = 2**30
_SEQUENCE: Mapping[str, Parameter] = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
"""Makes a request a sequence of its own, before any other can be there."""


async def warm_up(model: LoadedModel, folder: Path) -> list[WarmUp]:
    """Send the model its warm-up requests, and return what they took. `folder` is the model's.

    Raises InvalidRequest if one fails or cannot be made.
    """
    taken: list[WarmUp] = []
    for warmup in model.config.model_warmup:
        try:
            inputs = dict(_inputs(model.config, warmup, folder))
            parameters = _SEQUENCE if model.config.HasField("sequence_batching") else {}
            for version in model.card.versions:
                for _ in range(min(max(1, warmup.count), MAX_REQUESTS)):
                    name = f"warmup {warmup.name}"
                    request = ModelRequest(inputs, Context(name, version=version), (), parameters, name)
                    model.check(request, version)
                    start = time.perf_counter_ns()
                    async with closing(model.run(request)) as responses:
                        async for _ in responses:
                            pass
                    request.context.timings.rows = max(1, warmup.batch_size)
                    taken.append(WarmUp(version, time.perf_counter_ns() - start, request.context.timings))
        except DynamoError as error:
            raise InvalidRequest(f"the warm-up '{warmup.name}' failed: {error}") from error
    return taken


def _inputs(config: ModelConfig, warmup: ModelWarmup, folder: Path) -> Iterator[tuple[str, Array]]:
    """Yield the inputs of a request; those that sequence batching adds are left to it, as is the batch then."""
    added, _ = added_tensors(config)
    rows = 1 if config.HasField("sequence_batching") else max(1, warmup.batch_size)
    for name, given in warmup.inputs.items():
        if name in added:
            continue
        data = _data(name, given, folder)
        if config.max_batch_size:
            data = np.repeat(data[np.newaxis], rows, axis=0)
        yield name, data


def _data(name: str, given: ModelWarmup.Input, folder: Path) -> Array:
    """Return one element of a batch."""
    datatype = datatype_of_config(given.data_type)
    if datatype is None:
        raise InvalidRequest(f"input '{name}' has no data_type")
    count = element_count(given.dims, f"input '{name}'")
    if count * max(1, datatype.size) > MAX_BYTES:
        raise InvalidRequest(f"input '{name}' has {count} elements, which is too much")
    shape = tuple(given.dims)
    if given.WhichOneof("input_data_type") == "input_data_file":
        path = folder / FOLDER / relative_path(given.input_data_file)
        try:
            array = to_numpy(path.read_bytes(), datatype.name, shape, f"input '{name}'")
        except OSError as error:
            raise InvalidRequest(f"{FOLDER}/{given.input_data_file} cannot be read: {error.strerror}") from error
        return bf16_to_float32(array) if datatype.name == "BF16" else array
    if datatype.name == "BYTES":
        return np.full(shape, b"", object)
    dtype = np.dtype(np.float32) if datatype.name == "BF16" else datatype.dtype
    if not given.random_data:
        return np.zeros(shape, dtype)
    numbers = np.random.default_rng(0).random(math.prod(shape)).reshape(shape)
    return (numbers if dtype.kind == "f" else numbers * 2).astype(dtype)
