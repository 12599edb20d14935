"""Configurations that contradict themselves, as loads of models refuse them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from dynamo.common.errors import InvalidRequest
from dynamo.common.repository import LoadRequest, ModelState
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.config_checks import check_settings
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x

START = 'control_input [ { name: "c" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]'
BATCHED = f"{X_TO_Y} max_batch_size: 4"
PREFERRED = "dynamic_batching.preferred_batch_size"
LEVEL = "dynamic_batching.default_priority_level must be from 1 to 3, got"
KEYS = "dynamic_batching.priority_queue_policy must have keys from 1 to 3, got"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 2, 8 ] }", f"{PREFERRED} must be from 1 to 4, got 8"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 0 ] }", f"{PREFERRED} must be from 1 to 4, got 0"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [ -1 ] }", f"{PREFERRED} must be from 1 to 4, got -1"),
        ("dynamic_batching { preferred_batch_size: [ 4 ] }", f"{PREFERRED} needs a max_batch_size"),
        ('metric_tags { key: "cost center" value: "7" }', "first character, got 'cost center'"),
        ('metric_tags { key: "_team" value: "red" }', "metric_tags must have keys of letters, digits and"),
        ("dynamic_batching { priority_levels: 3 }", f"{LEVEL} 0"),
        ("dynamic_batching { priority_levels: 3 default_priority_level: 5 }", f"{LEVEL} 5"),
        ("dynamic_batching { priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 7 } }", f"{KEYS} 7"),
        ("dynamic_batching { priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 0 } }", f"{KEYS} 0"),
        ("dynamic_batching { priority_levels: 3 default_priority_level: 1 preserve_ordering: true }", "priority_levels must be"),
        (
            "dynamic_batching { preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "must not be DELAY",
        ),
        ("response_cache { enable: true } model_transaction_policy { decoupled: true }", "response_cache.enable must be false"),
        (
            f"response_cache {{ enable: true }} sequence_batching {{ direct {{ }} {START} }}",
            "response_cache.enable must be false",
        ),
        (f"sequence_batching {{ direct {{ minimum_slot_utilization: 2 }} {START} }}", "must be from 0 to 1, got 2"),
        (f"{BATCHED} batch_input [ {{ data_type: TYPE_FP32 }} ]", "batch_input.source_input must name one input, got 0"),
        (
            f'{BATCHED} batch_input [ {{ data_type: TYPE_FP32 source_input: "q" }} ]',
            "batch_input.source_input must be an input, got 'q'",
        ),
        (f'{BATCHED} batch_input [ {{ data_type: TYPE_INT64 source_input: "x" }} ]', "batch_input.data_type must be TYPE_INT32"),
        (
            f'{BATCHED} batch_input [ {{ data_type: TYPE_FP32 source_input: "x" target_name: "x" }} ]',
            "batch_input.target_name must not be an input of requests, got 'x'",
        ),
        (
            f'{BATCHED} batch_output [ {{ source_input: "x" target_name: "q" }} ]',
            "batch_output.target_name must be an output, got 'q'",
        ),
        (
            f'{BATCHED} batch_output [ {{ source_input: "x" target_name: [ "y", "y" ] }} ]',
            "batch_output.target_name must name each output once",
        ),
        (f'{X_TO_Y} batch_output [ {{ source_input: "x" target_name: "y" }} ]', "need a max_batch_size of at least 1"),
        ("version_policy { latest { num_versions: 0 } }", "version_policy.latest.num_versions must be at least 1, got 0"),
        ("version_policy { specific { } }", "version_policy.specific.versions must name a version"),
        ("instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]", "instance_group.gpus must be empty where the kind is KIND_CPU"),
    ],
)
def test_a_setting_that_triton_refuses_is_refused_by_the_name_of_its_field(settings: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_settings(text_format.Parse(settings, ModelConfig()))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 1, 4 ] }",
        "max_batch_size: 4 dynamic_batching { priority_levels: 3 default_priority_level: 3 priority_queue_policy { key: 3 } }",
        "dynamic_batching { preserve_ordering: true default_queue_policy { allow_timeout_override: true } }",
        "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
        "dynamic_batching { default_priority_level: 2 }",
        'metric_tags { key: "1st_team" value: "red, or \\"blue\\"" }',
        "response_cache { enable: true }",
        f"sequence_batching {{ direct {{ minimum_slot_utilization: 1 }} {START} }}",
        'instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "r" count: 4 } ] } } ]',
    ],
)
def test_a_setting_that_triton_takes_is_taken(settings: str) -> None:
    check_settings(text_format.Parse(settings, ModelConfig()))


async def test_a_wrong_setting_stops_its_model_only(tmp_path: Path) -> None:
    python_model(tmp_path, "right")
    wrong = X_TO_Y + "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }"
    python_model(tmp_path, "wrong", config=wrong)
    reason = "dynamic_batching.preferred_batch_size must be from 1 to 4, got 8"
    async with opened(tmp_path) as models:
        failed = await models.load_all(["right", "wrong"])
        assert {name: str(error) for name, error in failed.items()} == {"wrong": reason}
        with pytest.raises(InvalidRequest, match=reason):
            await models.load_model(LoadRequest(model="wrong"))
        index = {entry.name: (entry.state, entry.reason) for entry in models.index()}
        assert index == {"right": (ModelState.READY, ""), "wrong": (ModelState.UNAVAILABLE, reason)}
        assert await infer(models, "right", x(2)) == {"y": [4.0]}
