"""The handlers of KServe v2 over HTTP."""

from __future__ import annotations

import orjson
from google.protobuf.message import Message

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.tensors.message_json import to_json
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.kserve import messages as kserve_messages
from dynamo.frontend.api.kserve.rest.generate import handle_generate, handle_generate_stream
from dynamo.frontend.api.kserve.rest.infer import handle_infer
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.repository import handle_index, handle_load, handle_unload
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.serving.data_plane import DataPlane

_PLAIN = ((b"content-type", b"text/plain"),)


class Handlers:
    """One method per operation."""

    def __init__(self, plane: DataPlane, readiness: Readiness, server: KserveServer) -> None:
        self._plane = plane
        self._readiness = readiness
        self._state = server
        self._server = orjson.dumps(to_json(kserve_messages.server_metadata(server.name)))

    # Health

    async def live(self, exchange: Exchange) -> None:
        await exchange.respond(b"", 200, _PLAIN)

    async def ready(self, exchange: Exchange) -> None:
        await exchange.respond(b"", 200 if self._readiness.is_server_ready() else 400, _PLAIN)

    async def model_ready(self, exchange: Exchange) -> None:
        target = ModelPath.of(exchange.parameters)
        if self._readiness.is_model_ready(target.model, check_version(target.version)):
            return await exchange.respond(b"", 200, _PLAIN)
        raise InvalidRequest("Model version not ready")

    # Metadata

    async def server(self, exchange: Exchange) -> None:
        await exchange.respond(self._server)

    async def model(self, exchange: Exchange) -> None:
        target = ModelPath.of(exchange.parameters)
        card = self._plane.described(exchange.account, target.model, check_version(target.version))
        is_long = kserve_messages.is_long(card)
        await exchange.respond(await self._plane.descriptions.run_if(is_long, _metadata, card, target.version))

    async def config(self, exchange: Exchange) -> None:
        target = ModelPath.of(exchange.parameters)
        card = self._plane.described(exchange.account, target.model, check_version(target.version))
        await exchange.respond(await self._plane.descriptions.run_if(kserve_messages.is_long(card), _config, card))

    async def statistics(self, exchange: Exchange) -> None:
        target = ModelPath.of(exchange.parameters)
        statistics = await kserve_messages.statistics(self._plane, exchange.account, target.model, target.version)
        is_long = kserve_messages.is_long_json(statistics)
        await exchange.respond(await self._plane.descriptions.run_if(is_long, _json, statistics))

    # Model repositories

    async def index(self, exchange: Exchange) -> None:
        await handle_index(self._plane, self._readiness, exchange)

    async def load(self, exchange: Exchange) -> None:
        await handle_load(self._plane, exchange, ModelPath.of(exchange.parameters))

    async def unload(self, exchange: Exchange) -> None:
        await handle_unload(self._plane, exchange, ModelPath.of(exchange.parameters))

    # Inference

    async def infer(self, exchange: Exchange) -> None:
        await handle_infer(self._plane, self._state, exchange, ModelPath.of(exchange.parameters))

    async def generate(self, exchange: Exchange) -> None:
        await handle_generate(self._plane, self._state, exchange, ModelPath.of(exchange.parameters))

    async def generate_stream(self, exchange: Exchange) -> None:
        await handle_generate_stream(self._plane, self._state, exchange, ModelPath.of(exchange.parameters))


def _json(message: Message) -> bytes:
    return orjson.dumps(to_json(message))


def _config(card: ModelCard) -> bytes:
    return _json(kserve_messages.model_config(card).config)


def _metadata(card: ModelCard, version: str) -> bytes:
    metadata = to_json(kserve_messages.model_metadata(card, version))
    if not metadata["properties"]:
        del metadata["properties"]
    return orjson.dumps(metadata)
