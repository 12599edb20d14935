"""The operations of KServe v2 over HTTP: every path below /v2."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from dynamo.frontend.api.declaration import HEALTH
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.kserve import declarations as kserve
from dynamo.frontend.api.kserve.infer import TENSOR_ENDPOINT, TEXT_ENDPOINT
from dynamo.frontend.api.kserve.rest.handlers import Handlers
from dynamo.frontend.api.kserve.rest.requests import InferRequest
from dynamo.frontend.api.kserve.rest.settings import SettingHandlers
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.words import KSERVE_ERRORS
from dynamo.frontend.serving.data_plane import DataPlane

_MODEL = "/v2/models/{model:path}"
_VERSION = "/v2/models/{model:path}/versions/{version}"
_OBJECT = dict[str, Any]


class KserveError(msgspec.Struct):
    error: str
    """A sentence."""


_post = partial(Operation, method="POST", errors=KSERVE_ERRORS, group="KServe", error=KserveError)
_get = partial(_post, method="GET")
_health = partial(_get, declared=HEALTH)


def kserve_operations(plane: DataPlane, readiness: Readiness, server: KserveServer) -> list[Operation]:
    handlers, settings = Handlers(plane, readiness, server), SettingHandlers(plane, server)
    return [
        _get(path="/v2", declared=kserve.METADATA, handle=handlers.server, summary="The server and its extensions"),
        _health(path="/v2/health/live", handle=handlers.live, summary="Whether this process runs"),
        _health(path="/v2/health/ready", handle=handlers.ready, summary="Whether this server can serve, else 400"),
        *_of_repositories(handlers),
        _get(path="/v2/models/stats", declared=kserve.STATISTICS, handle=handlers.statistics, summary="Statistics of all models"),
        *_of_models(handlers, _VERSION),
        *_of_models(handlers, _MODEL),
        *_settings(settings),
        *_shared_memory(settings),
    ]


def _of_models(handlers: Handlers, path: str) -> Iterator[Operation]:
    yield _get(path=path, declared=kserve.METADATA, handle=handlers.model, summary="A model's tensors")
    yield _health(path=f"{path}/ready", handle=handlers.model_ready, summary="Whether a model can be used now, else 400")
    yield _get(path=f"{path}/config", declared=kserve.CONFIG, handle=handlers.config, summary="A model's configuration")
    yield _get(path=f"{path}/stats", declared=kserve.STATISTICS, handle=handlers.statistics, summary="A model's statistics")
    yield _post(
        path=f"{path}/infer",
        declared=kserve.REST_INFER,
        endpoint=TENSOR_ENDPOINT,
        handle=handlers.infer,
        summary="Tensors in, tensors out, in JSON or in binary behind it",
        request=InferRequest[Any],
        binary=True,
    )
    yield _post(
        path=f"{path}/generate",
        declared=kserve.GENERATE,
        endpoint=TEXT_ENDPOINT,
        handle=handlers.generate,
        summary="One JSON object in, one out",
        request=_OBJECT,
    )
    yield _post(
        path=f"{path}/generate_stream",
        declared=kserve.GENERATE,
        endpoint=TEXT_ENDPOINT,
        handle=handlers.generate_stream,
        summary="One JSON object in, events out",
        request=_OBJECT,
        streams=True,
    )


def _of_repositories(handlers: Handlers) -> Iterator[Operation]:
    """Yield the operations on the repository. Paths that name a repository are not described: there is one only."""
    for path, described in (("/v2/repository", True), ("/v2/repository/{repository}", False)):
        index = partial(_post, path=f"{path}/index", declared=kserve.INDEX, handle=handlers.index)
        yield index(summary="All models and versions" if described else "", request=_OBJECT)
        yield index(method="GET")
        for word, declared, handle in (("load", kserve.LOAD, handlers.load), ("unload", kserve.UNLOAD, handlers.unload)):
            yield _post(
                path=f"{path}/models/{{model:path}}/{word}",
                declared=declared,
                handle=handle,
                summary=f"{word.capitalize()} a model of the workers' model repositories" if described else "",
                request=_OBJECT,
            )


def _settings(handlers: SettingHandlers) -> Iterator[Operation]:
    operation = partial(Operation, errors=KSERVE_ERRORS)
    traced = ("/v2/trace/setting", f"{_VERSION}/trace/setting", f"{_MODEL}/trace/setting")
    for path, shown, changed, handle in (
        *((path, kserve.TRACE, kserve.SET_TRACE, handlers.trace) for path in traced),
        ("/v2/logging", kserve.LOG, kserve.SET_LOG, handlers.logging),
    ):
        yield operation(path=path, declared=shown, handle=handle, method="GET")
        yield operation(path=path, declared=changed, handle=handle, method="POST")


def _shared_memory(handlers: SettingHandlers) -> Iterator[Operation]:
    acts = partial(Operation, declared=kserve.SET_REGION, errors=KSERVE_ERRORS)
    for memory, status, register, unregister in (
        ("system", handlers.memory_status, handlers.register_memory, handlers.unregister_memory),
        ("cuda", handlers.cuda_status, handlers.register_cuda, handlers.unregister_cuda),
    ):
        base = f"/v2/{memory}sharedmemory"
        for path in (base, f"{base}/region/{{region:path}}"):
            yield acts(path=f"{path}/status", declared=kserve.REGIONS, method="GET", handle=status)
            yield acts(path=f"{path}/unregister", handle=unregister)
        yield acts(path=f"{base}/region/{{region:path}}/register", handle=register)
        yield acts(path=f"{base}/register", handle=handlers.register_unnamed)
