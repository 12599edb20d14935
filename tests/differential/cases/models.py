"""What both servers say about themselves and their models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.tensors import echo
from tests.differential.models import DATATYPES
from tests.differential.server_client import Response, ServerClient

_MODELS = (
    *(f"echo_{datatype.lower()}" for datatype in DATATYPES),
    *("echo_batched", "echo_matrix", "echo_batched_bytes", "echo_reshaped", "add_sub", "optional", "parameters", "repeat"),
    *("text", "scores", "scores_batched", "configured", "dynamic", "completing", "versions", "chain", "late", "broken"),
    *("unknown", "", "a b", "../x"),
)
_VERSIONS = ("", "1", "2", "3", "9", "x", "-1", "0", "01", "1.5", "99999999999999999999", " 1", "+1", "1 ")
_VERSIONED = ("versions", "echo_fp32", "chain", "late", "broken", "unknown")
_READS = (("metadata", ""), ("config", "/config"), ("statistics", "/stats"), ("readiness", "/ready"))
_CALLS = {
    "metadata": ("ModelMetadata", pb.ModelMetadataRequest),
    "config": ("ModelConfig", pb.ModelConfigRequest),
    "statistics": ("ModelStatistics", pb.ModelStatisticsRequest),
    "readiness": ("ModelReady", pb.ModelReadyRequest),
}
_COUNTED = ("echo_int8", "echo_batched", "versions", "repeat", "chain", "fails")


def cases() -> Iterator[Case]:
    yield from _server()
    yield from _statistics()
    for family, word in _READS:
        named = [(model, "") for model in _MODELS]
        named += [(model, version) for model, version in product(_VERSIONED, _VERSIONS) if version]
        for model, version in named:
            yield Case(family, f"gRPC {model!r} version {version!r}", partial(_read, family, model, version))
            path = f"/v2/models/{_quoted(model)}" + (f"/versions/{_quoted(version)}" if version else "") + word
            yield Case(family, f"REST {path}", partial(_rest, "GET", path))
    for kind, ready in product(("gRPC", "REST"), (False, True)):
        yield Case("index", f"{kind}, ready={ready}", partial(_index, kind, ready))
    for path, method, body in product(
        ("/v2/repository/index", "/v2/repository/models/index", "/v2/repository/other/index"),
        ("GET", "POST", "PUT"),
        (b"", b"{}", b'{"ready":true}', b'{"ready":"yes"}', b'{"ready":1}', b'{"ready":null}', b"[]", b"{", b"true"),
    ):
        if body and method != "POST":
            continue
        yield Case("index", f"{method} {path} {body.decode()}", partial(_rest, method, path, body))
    named_index = pb.RepositoryIndexRequest(repository_name="models")
    yield Case("index", "gRPC of a named repository", lambda client: client.call("RepositoryIndex", named_index))


def _server() -> Iterator[Case]:
    for name in ("ServerLive", "ServerReady", "ServerMetadata"):
        message = getattr(pb, f"{name}Request")()
        yield Case("server", f"gRPC {name}", partial(ServerClient.call, method=name, request=message))
        yield Case("server", f"gRPC {name}, no message", partial(ServerClient.call, method=name, request=b"\xff\xff"))
    paths = ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/health", "/v2/x", "/v3", "/", "/v2/models", "/v2/models/")
    for path, method in product(paths, ("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH")):
        yield Case("server", f"{method} {path}", partial(_rest, method, path))
    words = ("", "/ready", "/config", "/stats", "/infer", "/generate", "/generate_stream", "/trace/setting", "/x", "/versions/1")
    for word, method in product(words, ("GET", "POST", "PUT", "DELETE")):
        yield Case("server", f"{method} of a model {word}", partial(_rest, method, f"/v2/models/echo_fp32{word}"))


def _counted_requests(response: Response) -> int:
    body: Any = response.body or {"model_stats": []}
    statistics = [own["inference_stats"] for own in body["model_stats"]]
    return sum(int(own.get(outcome, {}).get("count", 0)) for own in statistics for outcome in ("success", "fail"))


def _statistics() -> Iterator[Case]:
    """Counts after a few requests to models that no other family uses before."""

    def counted(model: str, client: ServerClient) -> Response:
        message = echo("INT8")
        if model == "echo_batched":
            message = echo("FP32", (3, 4), model=model)
        elif model in ("versions", "chain"):
            message = echo("FP32", model=model)
        elif model == "repeat":
            message = echo("INT32", model=model)
            del message.raw_input_contents[:]
            message.raw_input_contents.append(bytes(12))
        elif model == "fails":
            message = echo("BYTES", (1,), model=model)
            message.raw_input_contents[0] = b"\x08\0\0\0INTERNAL"
        for _ in range(3):
            client.stream([message]) if model == "repeat" else client.call("ModelInfer", message)
        for _ in range(20):  # a request is counted after its response
            response = client.call("ModelStatistics", pb.ModelStatisticsRequest(name=model))
            if _counted_requests(response) >= 3:
                break
            time.sleep(0.05)
        return response

    for model in _COUNTED:
        yield Case("statistics", f"gRPC after three requests to {model}", partial(counted, model))
        yield Case("statistics", f"REST after three requests to {model}", partial(_rest, "GET", f"/v2/models/{model}/stats"))
    yield Case("statistics", "gRPC of all", lambda client: client.call("ModelStatistics", pb.ModelStatisticsRequest()))
    yield Case(
        "statistics",
        "gRPC of all in a version",
        lambda client: client.call("ModelStatistics", pb.ModelStatisticsRequest(version="1")),
    )
    yield Case("statistics", "REST of all", partial(_rest, "GET", "/v2/models/stats"))


def _read(family: str, model: str, version: str, client: ServerClient) -> Response:
    call, kind = _CALLS[family]
    return client.call(call, kind(name=model, version=version))


def _index(kind: str, ready: bool, client: ServerClient) -> Response:
    if kind == "gRPC":
        return client.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
    return client.rest("POST", "/v2/repository/index", {"ready": ready})


def _rest(method: str, path: str, body_or_client: bytes | ServerClient = b"", client: ServerClient | None = None) -> Response:
    if isinstance(body_or_client, ServerClient):
        return body_or_client.rest(method, path)
    assert client is not None
    return client.rest(method, path, body_or_client)


def _quoted(text: str) -> str:
    return text.replace(" ", "%20").replace("/", "%2F")
