"""GET /openapi.json, made from the types that requests are decoded into, and GET /docs, which shows it and uses no other site."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from dynamo.common.config import project_version
from dynamo.frontend.api.declaration import OtherSites, shown
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import HTML, JSON, Exchange
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.security.surfaces import Surface

_REFERENCES = "#/components/schemas/{name}"
_FAILURES = {
    "400": "The request cannot be served as written.",
    "404": "The model is not found.",
    "413": "The body is too large.",
    "500": "The engine failed, or this server did.",
    "501": "This server does not support what the request needs.",
    "503": "No instance can serve the request now.",
    "504": "The deadline has passed.",
}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations that have a summary."""
    operations = [operation for operation in operations if operation.summary]
    types = tuple({id(t): t for o in operations for t in (o.request, o.response, o.error) if t is not None}.values())
    schemas, components = _schemas(types)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path.replace(":path}", "}"), {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dynamo", "version": project_version()},
        "paths": paths,
        "components": {"schemas": components},
    }


@cache
def _schemas(types: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    return msgspec.json.schema_components(types, ref_template=_REFERENCES)


def _operation(operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema_of.get(id(operation.response), {})}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}} if operation.binary else {}
    content |= octets
    described: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.group],
        "responses": {"200": {"description": "The response.", "content": content}},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in (part[1:-1].removesuffix(":path") for part in operation.path.split("/") if part.startswith("{"))
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        body = {"application/json": {"schema": schema_of[id(operation.request)]}, **octets}
        described["requestBody"] = {"required": True, "content": body}
    if operation.error is not None:
        failure = {"application/json": {"schema": schema_of[id(operation.error)]}}
        described["responses"] |= {status: {"description": text, "content": failure} for status, text in _FAILURES.items()}
    return described


def openapi_operations(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that describe `operations`."""
    document = msgspec.json.encode(describe(operations))
    page = files(__package__).joinpath("docs.html").read_bytes()
    policy = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"

    async def openapi(exchange: Exchange) -> None:
        await exchange.respond(document, 200, (JSON,))

    async def docs(exchange: Exchange) -> None:
        await exchange.respond(page, 200, (HTML, (b"content-security-policy", policy)))

    return [
        Operation(
            method="GET",
            path=path,
            declared=shown(Surface.DOCS, other_sites=OtherSites.LINKED),
            errors=OPENAI_ERRORS,
            handle=handle,
        )
        for path, handle in (("/openapi.json", openapi), ("/docs", docs))
    ]
