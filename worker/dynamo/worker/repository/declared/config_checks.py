"""Settings of a configuration that contradict each other or themselves. Such a model does not load."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelInstanceGroup, ModelQueuePolicy
from dynamo.worker.engine.declaration import check_metric_tags
from dynamo.worker.repository.declared.ragged import ragged_problems


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
    utilization = config.sequence_batching.direct.minimum_slot_utilization
    if not 0 <= utilization <= 1:
        yield f"sequence_batching.direct.minimum_slot_utilization must be from 0 to 1, got {utilization:g}"
    if config.HasField("dynamic_batching"):
        yield from _batching_problems(config.dynamic_batching, config.max_batch_size)


def _version_problems(config: ModelConfig) -> Iterator[str]:
    policy = config.version_policy
    if policy.HasField("latest") and not policy.latest.num_versions:
        yield "version_policy.latest.num_versions must be at least 1, got 0"
    if policy.HasField("specific") and not policy.specific.versions:
        yield "version_policy.specific.versions must name a version"


def _batching_problems(batching: ModelDynamicBatching, max_batch_size: int) -> Iterator[str]:
    for size in batching.preferred_batch_size:
        if not max_batch_size:
            yield "dynamic_batching.preferred_batch_size needs a max_batch_size of at least 1"
        if not 1 <= size <= max_batch_size:
            yield f"dynamic_batching.preferred_batch_size must be from 1 to {max_batch_size}, got {size}"
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"dynamic_batching.default_priority_level must be from 1 to {levels}, got {batching.default_priority_level}"
        for level in sorted(batching.priority_queue_policy):
            if not 1 <= level <= levels:
                yield f"dynamic_batching.priority_queue_policy must have keys from 1 to {levels}, got {level}"
    if batching.preserve_ordering:
        if levels > 1:
            yield f"dynamic_batching.priority_levels must be at most 1 with preserve_ordering, got {levels}"
        policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
        if any(policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY for policy in policies):
            yield "dynamic_batching: the timeout_action of a queue policy must not be DELAY with preserve_ordering"
