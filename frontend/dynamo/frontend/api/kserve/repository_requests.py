"""The parameters of RepositoryModelLoad and RepositoryModelUnload, over gRPC and REST."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.common.adapters import LoadAdapter
from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.common.names import check_name
from dynamo.common.repository import NO_FILES, Files, LoadRequest, UnloadRequest
from dynamo.protos.inference_pb2 import ModelRepositoryParameter

FILE = "file:"
_ADAPTER_PATH = "lora_path"
"""The parameter that makes a load request one of a LoRA adapter."""
_ADAPTER_PARAMETERS = {_ADAPTER_PATH: str, "base_model_name": str, "load_inplace": bool}
_KINDS = {str: "string_param", bool: "bool_param"}
_NO_NAME = "'repository_name' specification is not supported"


def check_repository(name: str) -> None:
    """Raise Unsupported if a repository is named: there is one, which has no name."""
    if name:
        raise Unsupported(_NO_NAME)


def load_request(model: str, parameters: Mapping[str, object]) -> tuple[LoadRequest | LoadAdapter, Files]:
    """Return the load request, and the model's files, which are the bytes of `parameters`.

    Raises InvalidRequest for unknown or malformed parameters.
    """
    files = {
        name: (value,) for name, value in parameters.items() if name.startswith(FILE) and isinstance(value, bytes | memoryview)
    }
    return load_with_files(model, {name: value for name, value in parameters.items() if name not in files}, files)


def unload_request(model: str, parameters: Mapping[str, ModelRepositoryParameter]) -> UnloadRequest:
    """Return the unload request. Unknown parameters are ignored, as there. Raises InvalidRequest for malformed ones."""
    return _unload(model, {name: _value(parameter) for name, parameter in parameters.items()})


def unload_request_from_json(model: str, body: Mapping[str, object]) -> UnloadRequest:
    """Return the unload request of a JSON body. Raises InvalidRequest."""
    return _unload(model, parameters_of(body))


def load_with_files(model: str, parameters: Mapping[str, object], files: Files) -> tuple[LoadRequest | LoadAdapter, Files]:
    """Return the load request with these files, by the names of their parameters, and other parameters. Raises InvalidRequest."""
    check_name(model)
    if _ADAPTER_PATH in parameters:
        return _load_adapter(model, {**parameters, **files}), NO_FILES
    config, path = "", ""
    for name, value in parameters.items():
        if name == "config" and isinstance(value, str):
            config = value
        elif name == "model_path" and isinstance(value, str):
            path = value
        elif name in ("config", "model_path") or name.startswith(FILE):
            kind = "bytes_param" if name.startswith(FILE) else "string_param"
            raise InvalidRequest(f"invalid value type for load parameter '{name[:200]}', expected {kind}.")
        else:
            raise InvalidRequest(f"unrecognized load parameter '{name[:200]}'.")
    if files and not config:
        raise InvalidRequest("the parameter 'config' is required with file:<path>")
    return LoadRequest(model=model, config=config, path=path), {name.removeprefix(FILE): file for name, file in files.items()}


def _load_adapter(name: str, parameters: Mapping[str, object]) -> LoadAdapter:
    """Return a request to load a LoRA adapter: its parameters are named as in vLLM's `/v1/load_lora_adapter`."""
    fields: dict[str, object] = {"load_inplace": False, "base_model_name": "", **parameters}
    for parameter, value in fields.items():
        kind = _ADAPTER_PARAMETERS.get(parameter)
        if kind is None:
            raise InvalidRequest(f"unrecognized load parameter '{parameter[:200]}'.")
        if not isinstance(value, kind):
            raise InvalidRequest(f"invalid value type for load parameter '{parameter}', expected {_KINDS[kind]}.")
    return LoadAdapter(
        name=name,
        path=str(fields[_ADAPTER_PATH]),
        model=str(fields["base_model_name"]),
        in_place=bool(fields["load_inplace"]),
    )


def _unload(model: str, parameters: Mapping[str, object]) -> UnloadRequest:
    check_name(model)
    dependents = parameters.get("unload_dependents", False)
    if not isinstance(dependents, bool):
        raise InvalidRequest("invalid value type for 'unload_dependents' parameter, expected bool_param.")
    return UnloadRequest(model=model, dependents=dependents)


def parameters_of(body: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters in a JSON body. Raises InvalidRequest."""
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("'parameters' must be an object")
    return parameters


def _value(parameter: ModelRepositoryParameter) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)
