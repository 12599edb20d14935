"""The options of dynamic batching: what a class, YAML or Triton's `dynamic_batching` says, as one `Batching`.

An option of Triton's is read, checked and given its default in this module, and nowhere else; `batching` and `request_queue` act
on it. Only `preserve_ordering`, which engines of one model do not have, is read where it acts: `repository.scheduling.batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo.protos.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy
from dynamo.worker.engine.request_queue import DEFAULT_QUEUE_SIZE, QueuePolicies, QueuePolicy, TimeoutAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Dynamic batching, in Triton's terms. Sizes are rows: the first dimension, summed over the requests of a batch."""

    preferred_batch_size: Sequence[int] = ()
    """Empty: the largest."""
    max_queue_delay_us: int = 0
    max_queue_size: int = DEFAULT_QUEUE_SIZE
    """0: the default."""
    queue: QueuePolicies | None = None
    """Priority levels and timeouts of waiting requests; then `max_queue_size` is that of its policies."""

    @classmethod
    def read(cls, settings: ModelDynamicBatching) -> Batching:
        return cls(
            preferred_batch_size=tuple(settings.preferred_batch_size),
            max_queue_delay_us=settings.max_queue_delay_microseconds,
            queue=QueuePolicies(
                levels=settings.priority_levels,
                default_level=settings.default_priority_level,
                default=_queue_policy(settings.default_queue_policy),
                by_level={level: _queue_policy(policy) for level, policy in settings.priority_queue_policy.items()},
            ),
        )

    @property
    def policies(self) -> QueuePolicies:
        return self.queue or QueuePolicies(default=QueuePolicy(max_size=self.max_queue_size or DEFAULT_QUEUE_SIZE))


def _queue_policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction.DELAY if policy.timeout_action == ModelQueuePolicy.DELAY else TimeoutAction.REJECT,
        timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_size=policy.max_queue_size or DEFAULT_QUEUE_SIZE,
    )


def fill_batching_defaults(config: ModelConfig) -> None:
    """Set what `dynamic_batching` leaves out to what is in effect."""
    if config.HasField("dynamic_batching") and config.max_batch_size and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size[:] = [config.max_batch_size]


def batching_problems(batching: ModelDynamicBatching, max_batch_size: int) -> Iterator[str]:
    """Yield what Triton, too, refuses in `dynamic_batching`."""
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
