"""KServe v2 over HTTP: every path below /v2.

app = make_app([*kserve_rest_routes(readiness, options), …])
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from dynamo.common.errors import ModelNotFound, Unsupported
from dynamo.common.message_json import to_json
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import JSON, Endpoint, ErrorForm, Exchange, HttpSettings
from dynamo.frontend.api.kserve import messages as kserve_messages
from dynamo.frontend.api.kserve.rest.bodies import UnknownEncoding
from dynamo.frontend.api.kserve.rest.generate import answer_generate, answer_generate_stream
from dynamo.frontend.api.kserve.rest.infer import answer_infer
from dynamo.frontend.api.kserve.rest.paths import Resource, Target, find
from dynamo.frontend.api.kserve.rest.repository import answer_index, answer_load, answer_unload
from dynamo.frontend.api.statuses import public_message
from dynamo.frontend.config import HttpOptions, OverloadStatus


def kserve_rest_routes(
    readiness: Readiness, options: HttpOptions, overload: OverloadStatus = OverloadStatus.UNAVAILABLE
) -> list[BaseRoute]:
    app = KserveRest(readiness, HttpSettings.of(options, overload))
    return [Route("/v2", app), Route("/v2/{rest:path}", app)]


def _body(error: BaseException, status: int) -> bytes:
    return orjson.dumps({"error": public_message(error)})


def _event(error: BaseException, status: int) -> bytes:
    return b"data: " + _body(error, status) + b"\n\n"


ERRORS = ErrorForm(body=_body, event=_event)


@dataclass(frozen=True, slots=True)
class _Resource:
    methods: tuple[str, ...]
    answer: Callable[[Exchange, Target, str], Awaitable[None]]
    """Takes the method, too."""


class KserveRest:
    """An ASGI application."""

    def __init__(self, readiness: Readiness, settings: HttpSettings) -> None:
        self._readiness = readiness
        self._settings = settings
        self._server = orjson.dumps(to_json(kserve_messages.server_metadata()))
        get, post, both = ("GET", "HEAD"), ("POST",), ("GET", "HEAD", "POST")
        self._resources: Mapping[Resource, _Resource] = {
            Resource.SERVER: _Resource(get, self._metadata),
            Resource.LIVE: _Resource(get, self._live),
            Resource.READY: _Resource(get, self._ready),
            Resource.INDEX: _Resource(both, self._index),
            Resource.LOAD: _Resource(post, self._load),
            Resource.UNLOAD: _Resource(post, self._unload),
            Resource.ALL_STATISTICS: _Resource(get, self._statistics),
            Resource.MODEL: _Resource(get, self._model),
            Resource.MODEL_READY: _Resource(get, self._model_ready),
            Resource.CONFIG: _Resource(get, self._config),
            Resource.STATISTICS: _Resource(get, self._statistics),
            Resource.INFER: _Resource(post, self._infer),
            Resource.GENERATE: _Resource(post, self._generate),
            Resource.GENERATE_STREAM: _Resource(post, self._generate_stream),
            Resource.REFUSED: _Resource(both, self._refuse),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = find(scope["raw_path"])
        method: str = scope["method"]

        async def handle(exchange: Exchange) -> None:
            if target is None:
                return await _error(exchange, 404, f"there is no {exchange.path}")
            resource = self._resources[target.resource]
            if method not in resource.methods:
                allow = (b"allow", ", ".join(resource.methods).encode())
                return await _error(exchange, 405, f"{exchange.path} does not take {method}", allow)
            try:
                await resource.answer(exchange, target, method)
            except UnknownEncoding as error:
                await _error(exchange, 415, str(error), (b"accept-encoding", b"gzip, deflate"))

        await Endpoint(handle, ERRORS, self._settings)(scope, receive, send)

    # Health

    async def _live(self, exchange: Exchange, target: Target, method: str) -> None:
        await _send(exchange, {"live": True})

    async def _ready(self, exchange: Exchange, target: Target, method: str) -> None:
        ready = self._readiness.is_ready()
        await _send(exchange, {"ready": ready}, 200 if ready else 400)

    async def _model_ready(self, exchange: Exchange, target: Target, method: str) -> None:
        ready = self._readiness.is_model_ready(target.model, target.version)
        await _send(exchange, {"name": target.model, "ready": ready}, 200 if ready else 400)

    # What there is

    async def _metadata(self, exchange: Exchange, target: Target, method: str) -> None:
        await exchange.answer(self._server)

    async def _model(self, exchange: Exchange, target: Target, method: str) -> None:
        card = self._readiness.plane.card(exchange.account, target.model, target.version)
        await _send(exchange, to_json(kserve_messages.model_metadata(card)))

    async def _config(self, exchange: Exchange, target: Target, method: str) -> None:
        card = self._readiness.plane.card(exchange.account, target.model, target.version)
        await _send(exchange, to_json(kserve_messages.model_config(card).config))

    async def _statistics(self, exchange: Exchange, target: Target, method: str) -> None:
        async with exchange.attended():
            statistics = await self._readiness.plane.statistics(exchange.account, target.model, target.version)
        await _send(exchange, to_json(statistics))

    async def _index(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_index(self._readiness, exchange, target, method)

    async def _load(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_load(self._readiness, exchange, target)

    async def _unload(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_unload(self._readiness, exchange, target)

    async def _refuse(self, exchange: Exchange, target: Target, method: str) -> None:
        why = kserve_messages.REFUSED.get(target.model)
        if why is None:
            raise ModelNotFound(target.model)
        raise Unsupported(f"{target.model}: {why}")

    # Requests

    async def _infer(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_infer(self._readiness.plane, exchange, target)

    async def _generate(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_generate(self._readiness.plane, exchange, target)

    async def _generate_stream(self, exchange: Exchange, target: Target, method: str) -> None:
        await answer_generate_stream(self._readiness.plane, exchange, target)


async def _send(exchange: Exchange, body: object, status: int = 200) -> None:
    await exchange.answer(orjson.dumps(body), status)


async def _error(exchange: Exchange, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
    await exchange.answer(orjson.dumps({"error": message}), status, (JSON, *headers))
