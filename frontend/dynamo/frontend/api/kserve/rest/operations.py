"""What /openapi.json says of KServe's paths. Those of a model may all name a version as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.frontend.api.http.openapi import Operation
from dynamo.frontend.api.kserve.rest.requests import InferRequest

_GROUP = "KServe"
_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_OBJECT = dict[str, Any]


class KserveError(msgspec.Struct):
    error: str
    """A sentence."""


def _get(path: str, summary: str) -> Operation:
    return Operation(method="get", path=path, summary=summary, group=_GROUP, error=KserveError)


def _of_model(path: str) -> Iterator[Operation]:
    yield _get(path, "A model's tensors")
    yield _get(f"{path}/ready", "Whether a model can be used now, else 400")
    yield _get(f"{path}/config", "A model's configuration")
    yield _get(f"{path}/stats", "A model's statistics")
    yield Operation(
        path=f"{path}/infer",
        summary="Tensors in, tensors out, in JSON or in binary behind it",
        group=_GROUP,
        request=InferRequest[Any],
        error=KserveError,
        binary=True,
    )
    for word, summary in (("generate", "One JSON object in, one out"), ("generate_stream", "One JSON object in, events out")):
        yield Operation(
            path=f"{path}/{word}",
            summary=summary,
            group=_GROUP,
            request=_OBJECT,
            error=KserveError,
            streams=word == "generate_stream",
        )


OPERATIONS = (
    _get("/v2", "The server and its extensions"),
    _get("/v2/health/live", "Whether this process runs"),
    _get("/v2/health/ready", "Whether this server can serve, else 400"),
    Operation(path="/v2/repository/index", summary="All models and versions", group=_GROUP, request=_OBJECT, error=KserveError),
    *(
        Operation(
            path=f"/v2/repository/models/{{model}}/{word}",
            summary=f"{word.capitalize()} a model of the workers' model repositories",
            group=_GROUP,
            request=_OBJECT,
            error=KserveError,
        )
        for word in ("load", "unload")
    ),
    _get("/v2/models/stats", "Statistics of all models"),
    *_of_model(_MODEL),
    *_of_model(_VERSION),
)
