"""What models of Triton's Python backend import as `triton_python_backend_utils`.

The stub process puts this module into `sys.modules` under that name. The names, arguments and meanings are those that such
models are written against; what stands behind them is the worker's socket, `Channel`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamo.worker.repository.stub.pb_metrics import Metric, MetricFamily, MetricKind, ordered
from dynamo.worker.repository.stub.pb_requests import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    CallInProgress,
    Channel,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Lend,
    PreferredMemory,
    ResponseIterator,
    attach,
    channel,
)
from dynamo.worker.repository.stub.pb_tensors import (
    TRITON_STRING_TO_NUMPY,
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    Enumeration,
    ErrorCode,
    MemoryType,
    Tensor,
    TritonError,
    TritonModelException,
    datatype_of,
    deserialize_bytes_tensor,
    need,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from dynamo.worker.repository.wire import wire

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "CallInProgress",
    "Channel",
    "ErrorCode",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Lend",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "attach",
    "channel",
    "datatype_of",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "np",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


class Logger:
    """Writes to the worker's log."""

    class LogLevel(Enumeration):
        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        need("a log message", message, str)
        need("the log level", level, Logger.LogLevel)
        channel().send(wire.Log(_LOG_LEVELS[level], message))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


_LOG_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}
for _kind in (
    *(TritonModelException, TritonError, ErrorCode, Tensor, InferenceResponse, InferenceRequest, InferenceTrace),
    *(PreferredMemory, MemoryType, InferenceResponseSender, ResponseIterator, Logger, Logger.LogLevel),
    *(MetricFamily, Metric, MetricKind),
):
    _kind.__module__ = "c_python_backend_utils"  # under which Triton shows and pickles them
ErrorCode.__name__ = "__ErrorCode"


class ModelConfig:
    """A configuration as `auto_complete_config` receives it. What it refuses is a ValueError in Triton's words."""

    def __init__(self, config: str) -> None:
        self._config: dict[str, Any] = json.loads(config)
        self._where = f"auto-complete-config function for model '{self._config.get('name', '')}'"

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, ("name", "data_type", "dims"))

    def set_max_batch_size(self, size: int) -> None:
        given = self._config.get("max_batch_size") or 0
        if given > size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in {self._where} specified max_batch_size {size}"
            )
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but {self._where} tries to set scheduling_choice "
                    "as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, bool]) -> None:
        if set(policy) - {"decoupled"}:
            raise ValueError(f"model transaction property in {self._where} contains property other than 'decoupled'.")
        given = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" in policy:
            if given.get("decoupled", policy["decoupled"]) != policy["decoupled"]:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._config.get('name', '')}', "
                    f"which is already set to '{given['decoupled']}'."
                )
            given["decoupled"] = policy["decoupled"]

    def _add(self, kind: str, tensor: Mapping[str, Any], properties: Sequence[str]) -> None:
        named = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if set(tensor) - set(properties):
            texts = [f"'{name}'" for name in properties]
            listed = f"{', '.join(texts[:-1])} and {texts[-1]}"
            raise ValueError(f"{named} in {self._where} contains property other than {listed}.")
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{named} in {self._where} is missing '{name}' property.")
        for declared in self._config.setdefault(kind, []):
            if declared["name"] == tensor["name"]:
                return self._agree(kind, declared, tensor)
        self._config[kind].append(dict(tensor))

    def _agree(self, kind: str, declared: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        model = self._config.get("name", "")
        if declared.get("data_type", "TYPE_INVALID") not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {declared['data_type']} for {kind} "
                f"'{tensor['name']}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            given = declared.get(key)
            differs = (
                given and _plain(given) != _plain(tensor[key]) if key == "dims" else given not in (None, tensor.get(key, given))
            )
            if differs:
                raise ValueError(
                    f"model '{model}', tensor '{tensor['name']}': the model expects {key} {tensor[key]} but the model "
                    f"configuration specifies {key} {given}"
                )
        declared.update(tensor)


ModelConfig.__module__ = "triton_python_backend_utils"


def _plain(value: Any) -> Any:
    return [int(item) for item in value]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return channel().model_folder


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether another model of this worker can be called."""
    response = channel().control(wire.Control(number=0, verb="ready", model=model_name, version=str(model_version)))
    return response.error is None and bool(response.parameters.get("ready"))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model of this worker's repository; needs the explicit mode."""
    order = wire.Control(number=0, verb="load", model=model_name, config=config, files=dict(files or {}))
    ordered(order, "Failed to load model")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    order = wire.Control(number=0, verb="unload", model=model_name, dependents=unload_dependents)
    ordered(order, "Failed to unload model")
