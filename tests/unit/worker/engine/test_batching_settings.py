"""The options of dynamic batching: how each is read, and what it is without a value."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from dynamo.protos.model_config_pb2 import ModelConfig, ModelDynamicBatching
from dynamo.worker.engine.batching_settings import Batching, batching_problems, fill_batching_defaults
from dynamo.worker.engine.request_queue import QueuePolicies, QueuePolicy, TimeoutAction


def settings(text: str) -> ModelDynamicBatching:
    return text_format.Parse(text, ModelDynamicBatching())


def test_every_option_of_triton_is_read_into_the_settings() -> None:
    read = Batching.read(
        settings(
            "preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 300 priority_levels: 2 default_priority_level: 2 "
            "default_queue_policy { max_queue_size: 7 } priority_queue_policy { key: 1 value { timeout_action: DELAY "
            "default_timeout_microseconds: 50 allow_timeout_override: true } }"
        )
    )
    urgent = QueuePolicy(timeout_action=TimeoutAction.DELAY, timeout_us=50, allow_timeout_override=True)
    queue = QueuePolicies(levels=2, default_level=2, default=QueuePolicy(max_size=7), by_level={1: urgent})
    assert read == Batching(preferred_batch_size=(2, 4), max_queue_delay_us=300, queue=queue)
    assert read.policies == queue


def test_a_queue_size_of_zero_is_the_default() -> None:
    assert Batching(max_queue_size=0).policies == Batching().policies == Batching.read(settings("")).policies


@pytest.mark.parametrize(
    ("config", "preferred"),
    [
        ("max_batch_size: 4 dynamic_batching { }", [4]),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 2 }", [2]),
        ("dynamic_batching { }", []),
        ("max_batch_size: 4", []),
    ],
)
def test_the_largest_batch_is_preferred_where_no_size_is(config: str, preferred: list[int]) -> None:
    filled = text_format.Parse(config, ModelConfig())
    has_batching = filled.HasField("dynamic_batching")
    fill_batching_defaults(filled)
    assert (list(filled.dynamic_batching.preferred_batch_size), filled.HasField("dynamic_batching")) == (preferred, has_batching)


def test_every_contradiction_is_named_not_only_the_first() -> None:
    problems = list(batching_problems(settings("preferred_batch_size: [ 0, 9 ] priority_levels: 2 preserve_ordering: true"), 8))
    assert [problem.split(" must ")[0] for problem in problems] == [
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.default_priority_level",
        "dynamic_batching.priority_levels",
    ]
