"""Dynamic batching as a ModelConfig declares it."""

from __future__ import annotations

from dataclasses import replace

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.batching import BatchPolicy
from dynamo.worker.engine.declaration import from_dynamic_batching
from dynamo.worker.repository.execution import Arrays


def batch_policy(config: ModelConfig, concurrency: int, ahead: int = 0) -> BatchPolicy | None:
    """Return the batch policy of `config`; None if its requests are run one by one, as those of decoupled models are.

    Raises InvalidRequest for settings that contradict each other.
    """
    if not config.HasField("dynamic_batching") or not config.max_batch_size or config.model_transaction_policy.decoupled:
        return None
    try:
        policy = from_dynamic_batching(config.dynamic_batching).to_policy(config.max_batch_size, concurrency)
        return replace(policy, ahead=ahead)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def rows_of(inputs: Arrays) -> int:
    """Return the batch size of a request. Raises InvalidRequest if its inputs differ in it."""
    rows = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    if len(rows) != 1:
        raise InvalidRequest("the inputs of the request differ in their first dimension, the batch")
    return rows.pop()
