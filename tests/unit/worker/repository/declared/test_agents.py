"""Model repository agents: the checksum agent, and refusals of others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.agents import run_agents
from tests.support.repositories import X_TO_Y, opened, python_model

CONTENT = b"what the model needs"
MD5 = hashlib.md5(CONTENT).hexdigest()


def with_agent(name: str, **parameters: str) -> ModelConfig:
    config = ModelConfig()
    config.model_repository_agents.agents.add(name=name, parameters=parameters)
    return config


@pytest.mark.parametrize("key", ["MD5:1/data", "md5:1/data"])
def test_files_with_the_expected_checksum_are_accepted(tmp_path: Path, key: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "data").write_bytes(CONTENT)
    run_agents(with_agent("checksum", **{key: MD5}), tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("checksum", "MD5:data", rf"^Mismatched MD5 hash for file data, expect: 0, got: {MD5}$"),
        ("checksum", "MD5:other", r"the file other cannot be read: No such file"),
        ("checksum", "SHA256:data", r"a parameter of checksum must be MD5:<file>, got 'SHA256:data'"),
        ("checksum", "data", r"a parameter of checksum must be MD5:<file>, got 'data'"),
        ("checksum", "MD5:../data", r"is not a path inside the model's folder"),
        ("encryption", "key", r"^model_repository_agents: the agent 'encryption' is not supported; checksum is$"),
    ],
)
def test_other_files_and_agents_are_refused(tmp_path: Path, name: str, key: str, expected: str) -> None:
    (tmp_path / "data").write_bytes(CONTENT)
    with pytest.raises(InvalidRequest, match=expected):
        run_agents(with_agent(name, **{key: "0"}), tmp_path)


async def test_a_model_with_another_checksum_does_not_load(tmp_path: Path) -> None:
    agent = 'model_repository_agents { agents { name: "checksum" parameters { key: "MD5:1/model.py" value: "0" } } }'
    python_model(tmp_path, "double", config=f"{X_TO_Y}{agent}")
    with pytest.raises(InvalidRequest, match=r"Mismatched MD5 hash for file 1/model\.py"):
        async with opened(tmp_path, "double"):
            pass
