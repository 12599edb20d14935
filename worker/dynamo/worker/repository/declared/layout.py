"""What lies in a model repository.

repository/
    model/                  the model's name
        config.pbtxt        optional if the model's file declares its tensors
        labels.txt
        1/model.onnx        versions are folders whose names are numbers
        2/model.onnx
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig

Fingerprint: TypeAlias = tuple[tuple[str, int, int], ...]
"""Path, modification time in nanoseconds and size in bytes of every file."""

MAX_FILES = 10_000


def model_folders(repositories: Sequence[Path]) -> dict[str, list[Path]]:
    """Return every folder that can hold a model by name; several if several repositories have the name. Raises InvalidRequest."""
    folders: dict[str, list[Path]] = {}
    for repository in repositories:
        try:
            for entry in sorted(repository.iterdir()):
                if entry.is_dir() and not entry.name.startswith((".", "__")):
                    folders.setdefault(entry.name, []).append(entry)
        except OSError as error:
            raise InvalidRequest(f"the model repository {repository} cannot be read: {error.strerror or error}") from error
    return folders


def is_repository(folder: Path) -> bool:
    """Return whether a folder looks like a repository: some model in it has a configuration or a numbered version."""
    try:
        models = [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return False
    return any((model / "config.pbtxt").is_file() or versions_in(model) for model in models)


def versions_in(folder: Path) -> list[int]:
    """Return the version numbers of a model in ascending order. Other folders, and those with leading zeros, are not versions."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and not name.startswith("0"))


def served_versions(config: ModelConfig, folder: Path) -> list[str]:
    """Return the versions that the version policy chooses, oldest first. Raises InvalidRequest if there are none."""
    present = versions_in(folder)
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            chosen = present
        case "specific":
            wanted = sorted(set(policy.specific.versions))
            if missing := [version for version in wanted if version not in present]:
                raise InvalidRequest(f"version {missing[0]}, which the version policy names, is not there")
            chosen = wanted
        case _:
            chosen = present[-max(1, policy.latest.num_versions) :]
    if not chosen:
        raise InvalidRequest("there is no version: a model needs a folder whose name is a number above 0")
    return [str(version) for version in chosen]


def fingerprint(folder: Path) -> Fingerprint:
    """Return a value that changes when a file of the model does. A file that is removed meanwhile is left out."""
    entries: list[tuple[str, int, int]] = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        entries.append((where, 0, 0))
        for name in sorted(files):
            path = os.path.join(where, name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            entries.append((path, status.st_mtime_ns, status.st_size))
        if len(entries) > MAX_FILES:
            raise InvalidRequest(f"the folder of the model holds more than {MAX_FILES} files")
    return tuple(entries)
