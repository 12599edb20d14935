"""Model repository agents. There is one, Triton's `checksum`: a model whose files are not those that were meant does not load."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.paths import relative_path

_FIELD = "model_repository_agents"


def run_agents(config: ModelConfig, folder: Path) -> None:
    """Check the files of a model as its configuration demands. Blocks. Raises InvalidRequest."""
    for agent in config.model_repository_agents.agents:
        if agent.name != "checksum":
            raise InvalidRequest(f"{_FIELD}: the agent '{agent.name[:200]}' is not supported; checksum is")
        for key, expected in agent.parameters.items():
            _check_file(folder, key, expected)


def _check_file(folder: Path, key: str, expected: str) -> None:
    """`key`: `MD5:` and a path in the model's folder."""
    algorithm, _, name = key.partition(":")
    if algorithm.lower() != "md5" or not name:
        raise InvalidRequest(f"{_FIELD}: a parameter of checksum must be MD5:<file>, got '{key[:200]}'")
    try:
        with open(folder / relative_path(name), "rb") as file:
            given = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise InvalidRequest(f"{_FIELD}: the file {name} cannot be read: {error.strerror}") from error
    if given != expected:
        raise InvalidRequest(f"Mismatched MD5 hash for file {name}, expect: {expected[:64]}, got: {given}")
