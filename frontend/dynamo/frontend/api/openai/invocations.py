"""POST /invocations: requests of all kinds at one path, as SageMaker sends them to `vllm serve`. Their fields tell them apart.

| fields | served as |
|---|---|
| `messages` | `/v1/chat/completions` |
| `prompt` | `/v1/completions` |
| `query`, `documents` | `/v1/rerank` |
| `text_1`, `text_2` | `/v1/score` |
| `input` | `/v1/classify` for a model with labels, else `/v1/embeddings` |
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import decode, scanned_body
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.pooling.embeddings import embeds_texts
from dynamo.frontend.api.openai.pooling.text_tasks import classifies_texts
from dynamo.frontend.api.text.model_names import name_or_only_model

_ENDPOINTS = (
    ({"messages"}, "chat_completions"),
    ({"prompt"}, "completions"),
    ({"query", "documents"}, "rerank"),
    ({"text_1", "text_2"}, "score"),
    ({"input"}, "embeddings"),
)
"""By the fields that a request must have; the first that it has decides."""


class _Request(msgspec.Struct):
    model: str | None = None


class Invocations:
    """The endpoint, which leaves each request to that of its kind."""

    def __init__(self, edge: Edge, operations: Iterable[Operation]) -> None:
        self._edge = edge
        self._handlers = {operation.endpoint: operation.handle for operation in operations}
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._request = msgspec.json.Decoder(_Request)

    async def __call__(self, exchange: Exchange) -> None:
        body = await scanned_body(exchange)
        max_depth = exchange.settings.options.max_json_depth
        fields = decode(self._fields, body, max_depth)
        endpoint = next((endpoint for needed, endpoint in _ENDPOINTS if needed <= fields.keys()), None)
        if endpoint is None:
            kinds = "; ".join(" and ".join(f"'{field}'" for field in sorted(needed)) for needed, _ in _ENDPOINTS)
            raise InvalidRequest(f"the request has the fields of no endpoint, which are: {kinds}")
        if endpoint == "embeddings" and self._classifies(exchange, decode(self._request, body, max_depth).model):
            endpoint = "classify"
        exchange.pass_on(endpoint, body)
        await self._handlers[endpoint](exchange)

    def _classifies(self, exchange: Exchange, name: str | None) -> bool:
        plane, account = self._edge.plane, exchange.account
        model = plane.names.representative(account, name_or_only_model(plane, account, name, embeds_texts))
        return classifies_texts(plane.card(account, model))
