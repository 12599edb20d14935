"""Settings of a configuration that contradict each other or themselves. Such a model does not load."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from dynamo.worker.engine.batching_settings import batching_problems
from dynamo.worker.engine.declaration import check_metric_tags
from dynamo.worker.repository.declared.ragged import ragged_problems
from dynamo.worker.repository.declared.sequence_batching import sequence_problems


def check_settings(config: ModelConfig) -> None:
    """Raises InvalidRequest, naming the field, for settings that Triton refuses, too. The configuration is completed."""
    check_metric_tags(config)
    for problem in _problems(config):
        raise InvalidRequest(problem)


def _problems(config: ModelConfig) -> Iterator[str]:
    yield from _version_problems(config)
    yield from ragged_problems(config)
    for group in config.instance_group:
        if group.gpus and group.kind in (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL):
            yield f"instance_group.gpus must be empty where the kind is {ModelInstanceGroup.Kind.Name(group.kind)}"
    if config.response_cache.enable:
        if config.model_transaction_policy.decoupled:
            yield "response_cache.enable must be false for a model with model_transaction_policy.decoupled"
        if config.HasField("sequence_batching"):
            yield "response_cache.enable must be false for a model with sequence_batching"
    yield from sequence_problems(config)
    yield from batching_problems(config.dynamic_batching, config.max_batch_size)


def _version_problems(config: ModelConfig) -> Iterator[str]:
    policy = config.version_policy
    if policy.HasField("latest") and not policy.latest.num_versions:
        yield "version_policy.latest.num_versions must be at least 1, got 0"
    if policy.HasField("specific") and not policy.specific.versions:
        yield "version_policy.specific.versions must name a version"
