"""All HTTP paths that take or make text, and the pages that describe them."""

from __future__ import annotations

from starlette.routing import BaseRoute

from dynamo.frontend.api.anthropic.messages import OPERATIONS as ANTHROPIC_OPERATIONS
from dynamo.frontend.api.anthropic.messages import MessagesEdge, anthropic_routes
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.openapi import Operation, openapi_routes
from dynamo.frontend.api.http.routing_routes import OPERATIONS as ROUTING_OPERATIONS
from dynamo.frontend.api.kserve.rest.operations import OPERATIONS as KSERVE_OPERATIONS
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.routes import OPERATIONS as OPENAI_OPERATIONS
from dynamo.frontend.api.openai.routes import openai_routes, read_request_template
from dynamo.frontend.config import HttpOptions, OverloadStatus, TextOptions
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import OutputParsers

_GENERAL = (
    Operation(method="get", path="/v1/models", summary="The models there are", group="Models"),
    Operation(method="get", path="/v1/models/{model}", summary="One model", group="Models"),
    Operation(method="get", path="/v1/models/{model}/ready", summary="Whether a model can be used now", group="Models"),
    Operation(method="get", path="/health", summary="Whether this server can serve, and what stands behind it", group="Server"),
    Operation(method="get", path="/live", summary="Whether this process runs", group="Server"),
    Operation(method="get", path="/metrics", summary="Prometheus metrics", group="Server"),
)


def text_routes(
    readiness: Readiness,
    http: HttpOptions,
    text: TextOptions,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    parsers: OutputParsers = PARSER_REGISTRY,
) -> list[BaseRoute]:
    """Raises ConfigError for a request template that cannot be read."""
    settings = HttpSettings.of(http, overload)
    limits = text.limits
    template = read_request_template(text.request_template)
    return [
        *openai_routes(Edge(readiness=readiness, limits=limits, template=template, parsers=parsers), settings),
        *anthropic_routes(MessagesEdge(readiness=readiness, limits=limits, parsers=parsers), settings),
        *openapi_routes((*OPENAI_OPERATIONS, *ANTHROPIC_OPERATIONS, *KSERVE_OPERATIONS, *ROUTING_OPERATIONS, *_GENERAL)),
    ]
