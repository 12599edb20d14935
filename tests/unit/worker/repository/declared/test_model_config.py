"""Model configurations that are read, from text and from JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.worker.repository.declared.model_config import config_from_json, read_config


@pytest.mark.parametrize(
    ("text", "json", "reason"),
    [
        ("instance_group { kind: 77 }", '{"instanceGroup": [{"kind": 77}]}', "kind is 77, which is no Kind"),
        ("input { data_type: 99 }", '{"input": [{"dataType": 99}]}', "data_type is 99, which is no DataType"),
        (
            "dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: 9 } } }",
            '{"dynamicBatching": {"priorityQueuePolicy": {"1": {"timeoutAction": 9}}}}',
            "timeout_action is 9, which is no TimeoutAction",
        ),
    ],
)
def test_a_number_that_is_no_constant_of_its_enum_is_refused(text: str, json: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(InvalidRequest, match=reason):
        read_config(tmp_path / "config.pbtxt")
    with pytest.raises(InvalidRequest, match=reason):
        config_from_json(json)


def test_all_that_is_known_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('instance_group [ { kind: KIND_CPU }, { kind: 1 gpus: [ 0, 1 ] } ] name: "m"')
    config = read_config(tmp_path / "config.pbtxt")
    assert [group.kind for group in config.instance_group] == [2, 1]
