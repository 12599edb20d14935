"""Loading and unloading models. Each step sees what the one before it left behind."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.tensors import echo
from tests.differential.server_client import Response, ServerClient

_CONFIG = {
    "name": "late",
    "backend": "python",
    "max_batch_size": 2,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}
_CODE = b"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value + 1)]) for value in values]
"""

Values = Mapping[str, Any]


def cases() -> Iterator[Case]:
    yield from _steps("gRPC")
    yield from _steps("REST")


def _steps(kind: str) -> Iterator[Case]:
    def load(what: str, model: str, parameters: Values | None = None) -> Iterator[Case]:
        yield Case("repository", f"{kind} {what}", partial(_change, kind, "load", model, parameters or {}))
        yield from seen(f"after {what}", model)

    def unload(what: str, model: str, parameters: Values | None = None) -> Iterator[Case]:
        yield Case("repository", f"{kind} {what}", partial(_change, kind, "unload", model, parameters or {}))
        yield from seen(f"after {what}", model)

    def seen(what: str, model: str) -> Iterator[Case]:
        name = f"{kind} {what}"
        yield Case("repository", f"{name}: index", partial(_index_of, model))
        yield Case("repository", f"{name}: ready", partial(_read, "ModelReady", model))
        if model:
            yield Case("repository", f"{name}: metadata", partial(_read, "ModelMetadata", model))
            yield Case("repository", f"{name}: config", partial(_read, "ModelConfig", model))
            yield Case("repository", f"{name}: infer", lambda client: client.call("ModelInfer", echo("FP32", model=model)))
            yield Case("repository", f"{name}: REST metadata", lambda client: client.rest("GET", f"/v2/models/{model}"))

    yield from load("load of a model", "late")
    yield from load("load of a model again", "late")
    yield from unload("unload of a model", "late")
    yield from unload("unload of a model again", "late")
    yield from load("load of an unknown model", "unknown")
    yield from unload("unload of an unknown model", "unknown")
    yield from load("load of a model that raises", "broken")
    yield from unload("unload of a model that did not load", "broken")
    for name in ("", " ", "a b", "../late", "late/../late", "x" * 300):
        yield Case("repository", f"{kind} load of {name[:20]!r}", partial(_change, kind, "load", name, {}))
        yield Case("repository", f"{kind} unload of {name[:20]!r}", partial(_change, kind, "unload", name, {}))
    yield from load("load with a configuration", "late", {"config": json.dumps(_CONFIG)})
    yield from load("load without it again", "late")
    yield from load("load with a wrong configuration", "late", {"config": "{"})
    yield from load("load with a configuration of another name", "late", {"config": json.dumps(_CONFIG | {"name": "other"})})
    yield from load("load with an unknown backend", "late", {"config": json.dumps(_CONFIG | {"backend": "nonsense"})})
    yield from load("load with unknown fields", "late", {"config": json.dumps(_CONFIG | {"nonsense": 1})})
    files = {"config": json.dumps(_CONFIG | {"name": "sent"}), "file:1/model.py": _CODE}
    yield from load("load of a model that is sent", "sent", files)
    yield from unload("unload of a model that was sent", "sent")
    yield from load("load of a model that was sent", "sent")
    yield from load("load with files only", "sent", {"file:1/model.py": _CODE})
    yield from load("load of files beyond the folder", "sent", files | {"file:../../x": b"x"})
    yield from load("load of files with an absolute path", "sent", files | {"file:/tmp/x": b"x"})
    yield from load("load with an unknown parameter", "late", {"nonsense": "1"})
    yield from load("load with a wrong type", "late", {"config": 5})
    yield from unload("unload with an unknown parameter", "late", {"nonsense": True})
    yield from load("load for the next", "late")
    yield from unload("unload with a wrong type", "late", {"unload_dependents": 1})
    yield from load("load of an ensemble", "needs_late")
    yield from unload("unload of a part of an ensemble", "late")
    yield from seen("an ensemble without its part", "needs_late")
    yield from load("load of the part again", "late")
    yield from seen("an ensemble with its part again", "needs_late")
    yield from unload("unload of an ensemble with its parts", "needs_late", {"unload_dependents": True})
    yield from seen("the part of an unloaded ensemble", "late")
    yield from load("load of several versions", "versions")
    only_one = json.dumps(_CONFIG | {"name": "versions", "version_policy": {"specific": {"versions": [1]}}})
    yield from load("load of one version after several", "versions", {"config": only_one})
    yield Case("repository", f"{kind} infer by the version that is left out", partial(_call_version, "3"))
    yield from unload("unload of several versions", "versions")
    for path in ("/v2/repository/models/late/load", "/v2/repository/other/models/late/load", "/v2/repository/models//load"):
        for method, body in (
            ("GET", b""),
            ("POST", b"{"),
            ("POST", b"[]"),
            ("POST", b'{"parameters":1}'),
            ("POST", b'{"parameters":null}'),
        ):
            yield Case("repository", f"{kind} {method} {path} {body!r}", partial(_rest, method, path, body))
    yield from unload("unload at last", "late")
    yield from unload("unload of what was sent", "sent")


def _call_version(version: str, client: ServerClient) -> Response:
    request = echo("FP32", model="versions")
    request.model_version = version
    return client.call("ModelInfer", request)


def _change(kind: str, word: str, model: str, parameters: Values, client: ServerClient) -> Response:
    if kind == "REST":
        encoded = {
            key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in parameters.items()
        }
        name = model.replace(" ", "%20").replace("/", "%2F")
        return client.rest("POST", f"/v2/repository/models/{name}/{word}", {"parameters": encoded} if encoded else b"")
    message = (pb.RepositoryModelLoadRequest if word == "load" else pb.RepositoryModelUnloadRequest)(model_name=model)
    for key, value in parameters.items():
        match value:
            case bool():
                message.parameters[key].bool_param = value
            case int():
                message.parameters[key].int64_param = value
            case str():
                message.parameters[key].string_param = value
            case bytes():
                message.parameters[key].bytes_param = value
    return client.call(f"RepositoryModel{word.capitalize()}", message)


def _index_of(model: str, client: ServerClient) -> Response:
    response = client.call("RepositoryIndex", pb.RepositoryIndexRequest())
    entries = (response.body or {}).get("models", [])
    return Response(response.status, response.words, [entry for entry in entries if entry["name"] == model])


def _read(call: str, model: str, client: ServerClient) -> Response:
    return client.call(call, getattr(pb, f"{call}Request")(name=model))


def _rest(method: str, path: str, body: bytes, client: ServerClient) -> Response:
    return client.rest(method, path, body)
