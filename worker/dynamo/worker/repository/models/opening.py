"""The versions of a model, opened by its backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.execution import Executable, ModelBackend, OpensInstances, Version
from dynamo.worker.repository.scheduling.batches import BatchedModel
from dynamo.worker.repository.scheduling.sequences import SequenceModel
from dynamo.worker.repository.sessions.onnx_backend import open_onnx
from dynamo.worker.repository.sessions.openvino_backend import open_openvino
from dynamo.worker.repository.sessions.session import Session
from dynamo.worker.repository.sessions.tensorrt_backend import open_tensorrt
from dynamo.worker.repository.sessions.torch_backend import open_torch

SESSIONS: Mapping[str, Callable[[Version], Session]] = {
    "onnxruntime": open_onnx,
    "pytorch": open_torch,
    "openvino": open_openvino,
    "tensorrt": open_tensorrt,
}


async def _open_version(backend: ModelBackend, version: Version) -> Executable:
    """Load a version, with the scheduler that its configuration names around it."""
    scheduler = version.config.WhichOneof("scheduling_choice")
    if scheduler is None or scheduler == "ensemble_scheduling":
        return await backend.open(version)
    if not isinstance(backend, OpensInstances):
        raise InvalidRequest(f"the backend '{version.config.backend}' has no {scheduler}")
    if scheduler == "dynamic_batching":
        return BatchedModel(version.config, await backend.open(version))
    instances = await backend.open_instances(version)
    try:
        return SequenceModel(version.config, instances, version.folder)
    except BaseException:
        await asyncio.gather(*(instance.close() for instance in instances))
        raise


async def open_versions(
    backend: ModelBackend, config: ModelConfig, folder: Path, versions: Sequence[str]
) -> dict[str, Executable]:
    opened = await asyncio.gather(
        *(_open_version(backend, Version(config.name, version, config, folder)) for version in versions), return_exceptions=True
    )
    executables = {
        version: executable
        for version, executable in zip(versions, opened, strict=True)
        if not isinstance(executable, BaseException)
    }
    for version, result in zip(versions, opened, strict=True):
        if isinstance(result, BaseException):
            await asyncio.gather(*(executable.close() for executable in executables.values()))
            if isinstance(result, DynamoError) and len(versions) > 1:
                raise InvalidRequest(f"version {version}: {result}") from result
            raise result
    return executables
