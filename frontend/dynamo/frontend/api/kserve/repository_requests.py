"""RepositoryModelLoad and RepositoryModelUnload: what their parameters say, by gRPC and by REST."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import check_name
from dynamo.common.repository import LoadRequest, UnloadRequest
from dynamo.protos.inference_pb2 import ModelRepositoryParameter

FILE = "file:"
_NO_NAME = "there is one repository, without a name: leave 'repository_name' empty"


def check_repository(name: str) -> None:
    """Raises InvalidRequest if a repository is named."""
    if name:
        raise InvalidRequest(_NO_NAME)


def load_request(model: str, parameters: Mapping[str, ModelRepositoryParameter]) -> LoadRequest:
    """Raises InvalidRequest."""
    return _load(model, {name: _value(parameter) for name, parameter in parameters.items()})


def unload_request(model: str, parameters: Mapping[str, ModelRepositoryParameter]) -> UnloadRequest:
    """Raises InvalidRequest."""
    return _unload(model, {name: _value(parameter) for name, parameter in parameters.items()})


def load_request_from_json(model: str, body: Mapping[str, object]) -> LoadRequest:
    """As `load_request`; files are in base64."""
    found: dict[str, object] = {}
    for name, value in _parameters(body).items():
        if name.startswith(FILE) and isinstance(value, str):
            try:
                value = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"the parameter {name[:200]!r} is not base64") from None
        found[name] = value
    return _load(model, found)


def unload_request_from_json(model: str, body: Mapping[str, object]) -> UnloadRequest:
    """As `unload_request`."""
    return _unload(model, _parameters(body))


def _load(model: str, parameters: Mapping[str, object]) -> LoadRequest:
    check_name(model)
    config, path = "", ""
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name == "config" and isinstance(value, str):
            config = value
        elif name == "model_path" and isinstance(value, str):
            path = value
        elif name.startswith(FILE) and isinstance(value, bytes):
            files[name.removeprefix(FILE)] = value
        elif name in ("config", "model_path") or name.startswith(FILE):
            raise InvalidRequest(f"the parameter {name[:200]!r} must be {'bytes' if name.startswith(FILE) else 'a string'}")
        else:
            raise InvalidRequest(f"loading has no parameter {name[:200]!r}; it has config, model_path and file:<path>")
    if files and not config:
        raise InvalidRequest("files of the model need the parameter 'config', too")
    return LoadRequest(model=model, config=config, files=files, path=path)


def _unload(model: str, parameters: Mapping[str, object]) -> UnloadRequest:
    check_name(model)
    for name, value in parameters.items():
        if name != "unload_dependents":
            raise InvalidRequest(f"unloading has no parameter {name[:200]!r}; it has unload_dependents")
        if not isinstance(value, bool):
            raise InvalidRequest("the parameter 'unload_dependents' must be true or false")
    return UnloadRequest(model=model, dependents=bool(parameters.get("unload_dependents", False)))


def _parameters(body: Mapping[str, object]) -> Mapping[str, object]:
    found = body.get("parameters", {})
    if not isinstance(found, dict):
        raise InvalidRequest("'parameters' must be an object")
    return found


def _value(parameter: ModelRepositoryParameter) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)
