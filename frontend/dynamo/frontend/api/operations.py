"""The HTTP operations that need the data plane alone: text in the forms of OpenAI and Anthropic, and KServe v2."""

from __future__ import annotations

from dynamo.frontend.api.anthropic.messages import MessagesEdge, anthropic_operations
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.kserve.rest.operations import kserve_operations
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.operations import openai_operations
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.config import TextOptions
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import OutputParsers
from dynamo.frontend.serving.data_plane import DataPlane


def protocol_operations(
    plane: DataPlane,
    readiness: Readiness,
    text: TextOptions,
    parsers: OutputParsers = PARSER_REGISTRY,
    kserve: KserveServer | None = None,
    background: BackgroundResponses | None = None,
    template: RequestTemplate | None = None,
) -> list[Operation]:
    limits = text.limits
    offload = Offload()
    return [
        *openai_operations(
            Edge(
                plane=plane,
                limits=limits,
                template=template or RequestTemplate(),
                parsers=parsers,
                offload=offload,
                background=background,
                trusts_templates=text.trust_request_chat_template,
                trusts_kv_transfers=text.trust_kv_transfer_params,
                tokens_as_ids=text.return_tokens_as_token_ids,
            )
        ),
        *anthropic_operations(MessagesEdge(plane=plane, limits=limits, parsers=parsers, offload=offload)),
        *kserve_operations(plane, readiness, kserve or KserveServer()),
    ]
