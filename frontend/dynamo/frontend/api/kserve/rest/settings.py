"""Triton's extensions for trace settings, log settings and shared memory over HTTP."""

from __future__ import annotations

import orjson

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.kserve.rest.json_types import as_array, as_boolean, as_string, as_unsigned
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.requests import read_object
from dynamo.frontend.api.kserve.server import NO_CUDA, KserveServer, check_cuda, check_traced
from dynamo.frontend.api.kserve.settings import LOG_FLAGS, TRACE_NUMBERS, LogValue, Values
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.serving.data_plane import DataPlane


class SettingHandlers:
    """One method per operation."""

    def __init__(self, plane: DataPlane, server: KserveServer) -> None:
        self._plane = plane
        self._server = server

    async def trace(self, exchange: Exchange) -> None:
        target = ModelPath.of(exchange.parameters)
        check_traced(self._plane, exchange.account, target.model)
        changes = await _object(exchange) if exchange.method == "POST" else {}
        settings = {key: _trace_values(key, value) for key, value in changes.items()}
        check_version(target.version)
        shown = await self._server.trace_settings(self._plane, exchange.account, target.model, settings)
        await _send(exchange, {key: values if key == "trace_level" else values[0] for key, values in shown.items()})

    async def logging(self, exchange: Exchange) -> None:
        changes = await _object(exchange) if exchange.method == "POST" else {}
        await self._server.settings.change_log({key: _log_value(key, value) for key, value in changes.items()})
        await _send(exchange, self._server.settings.log())

    # Shared memory

    async def memory_status(self, exchange: Exchange) -> None:
        regions = self._server.regions.status(exchange.parameters.get("region", ""))
        await _send(
            exchange,
            [
                {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size_bytes}
                for region in regions
            ],
        )

    async def register_memory(self, exchange: Exchange) -> None:
        _ = self._server.regions  # a server without any refuses first
        fields = await _object(exchange, required=True)
        for field in ("key", "byte_size"):
            if field not in fields:
                raise InvalidRequest(f"Shared memory register request has no '{field}' field")
        self._server.register_memory(
            exchange.account,
            exchange.peer,
            exchange.parameters["region"],
            as_string(fields["key"]),
            as_unsigned(fields.get("offset", 0)),
            as_unsigned(fields["byte_size"]),
        )
        await exchange.respond(b"")

    async def unregister_memory(self, exchange: Exchange) -> None:
        self._server.regions.unregister(exchange.parameters.get("region", ""))
        await exchange.respond(b"")

    async def register_unnamed(self, exchange: Exchange) -> None:
        raise InvalidRequest("'region name' is necessary to register system shared memory region")

    async def cuda_status(self, exchange: Exchange) -> None:
        check_cuda(exchange.parameters.get("region", ""))
        await _send(exchange, [])

    async def register_cuda(self, exchange: Exchange) -> None:
        raise Unsupported(NO_CUDA)

    async def unregister_cuda(self, exchange: Exchange) -> None:
        await exchange.respond(b"")


def _trace_values(key: str, value: object) -> Values:
    if value is None:
        return None
    if key == "trace_level":
        return [as_string(level) for level in as_array(value)]
    return [as_string(value)] if key in TRACE_NUMBERS else ()


def _log_value(key: str, value: object) -> LogValue:
    if key in LOG_FLAGS:
        return as_boolean(value)
    if key == "log_verbose_level":
        return as_unsigned(value)
    return as_string(value) if key == "log_format" else ""


async def _object(exchange: Exchange, *, required: bool = False) -> dict[str, object]:
    body = await exchange.decompressed_body()
    return await read_object(exchange, body) if body or required else {}


async def _send(exchange: Exchange, body: object) -> None:
    await exchange.respond(orjson.dumps(body))
