"""Dynamic batching as a ModelConfig declares it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.batching import Batcher, BatchPolicy
from dynamo.worker.engine.declaration import from_dynamic_batching
from dynamo.worker.engine.request_queue import QueueOptions
from dynamo.worker.repository.declared.execution import Arrays, ModelRequest
from dynamo.worker.repository.declared.ragged import ragged_inputs


def batch_policy(config: ModelConfig, concurrency: int, ahead: int = 0) -> BatchPolicy | None:
    """Return the batch policy of `config`; None if its requests do not queue.

    Requests of a model without a batch dimension are run one by one; they queue, as one row each, if there are queue policies.
    Raises InvalidRequest for settings that contradict each other.
    """
    if not config.HasField("dynamic_batching"):
        return None
    try:
        policy = from_dynamic_batching(config.dynamic_batching).to_policy(max(1, config.max_batch_size), concurrency)
        if not config.max_batch_size and policy.queue.is_plain:
            return None
        return replace(policy, ahead=ahead, ragged_inputs=ragged_inputs(config))
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


async def submit(batcher: Batcher, config: ModelConfig, request: ModelRequest, submitted: object = None) -> Any:
    """Run a request with others. Raises InvalidRequest if its inputs differ in their batch size, and what `Batcher` raises.

    The batch has `submitted` in place of the request, if that is given.
    """
    options = QueueOptions.of(request.id, request.parameters)
    rows = rows_of(request.inputs) if config.max_batch_size else 1
    return await batcher.submit(request.inputs, rows, request.context, request.context.version, submitted or request, options)


def rows_of(inputs: Arrays) -> int:
    """Return the batch size of a request. Raises InvalidRequest if its inputs differ in it."""
    rows = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    if len(rows) != 1:
        raise InvalidRequest("the inputs of the request differ in their first dimension, the batch")
    return rows.pop()
