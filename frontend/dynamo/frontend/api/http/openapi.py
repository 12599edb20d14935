"""GET /openapi.json, made from the types that requests are decoded into, and GET /docs, which shows it and needs no internet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dynamo.common.config import project_version

_REFERENCES = "#/components/schemas/{name}"
_FAILURES = {
    "400": "The request cannot be served as written.",
    "404": "No such model.",
    "413": "The body is too large.",
    "500": "The engine failed, or this server did.",
    "501": "The request asks for something that is not done here.",
    "503": "Nothing can serve this now.",
    "504": "The deadline has passed.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    summary: str
    group: str
    method: str = "post"
    request: Any = None
    """The type of the body; None: there is none."""
    answer: Any = None
    error: Any = None
    streams: bool = False
    """The answer may be server-sent events, if the request says `stream`."""
    binary: bool = False
    """JSON may be followed by binary data, in requests and answers."""


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = list({id(t): t for o in operations for t in (o.request, o.answer, o.error) if t is not None}.values())
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dynamo", "version": project_version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of.get(id(operation.answer), {})}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}} if operation.binary else {}
    content |= octets
    found: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.group],
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in (part[1:-1] for part in operation.path.split("/") if part.startswith("{"))
    ]
    if parameters:
        found["parameters"] = parameters
    if operation.request is not None:
        body = {"application/json": {"schema": schema_of[id(operation.request)]}, **octets}
        found["requestBody"] = {"required": True, "content": body}
    if operation.error is not None:
        failure = {"application/json": {"schema": schema_of[id(operation.error)]}}
        found["responses"] |= {status: {"description": text, "content": failure} for status, text in _FAILURES.items()}
    return found


def openapi_routes(operations: Sequence[Operation]) -> list[BaseRoute]:
    document = msgspec.json.encode(describe(operations))
    page = files(__package__).joinpath("docs.html").read_bytes()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html", headers={"content-security-policy": policy})

    return [Route("/openapi.json", openapi), Route("/docs", docs)]
