"""Triton's model repository extension over HTTP: index, load and unload."""

from __future__ import annotations

import orjson

from dynamo.common.errors import InvalidRequest
from dynamo.common.process.work import Work
from dynamo.common.tensors.message_json import to_json
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.kserve import messages as kserve_messages
from dynamo.frontend.api.kserve.repository_requests import check_repository, unload_request_from_json
from dynamo.frontend.api.kserve.rest.long_arrays import SHORT_BYTES
from dynamo.frontend.api.kserve.rest.model_files import LongStrings, cut_strings, load_from_json
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.requests import object_of, read_object
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane


async def handle_index(plane: DataPlane, readiness: Readiness, exchange: Exchange) -> None:
    parsed = await _object(exchange) if exchange.method == "POST" else {}
    only_ready = parsed.get("ready", False)
    if not isinstance(only_ready, bool):
        raise InvalidRequest("'ready' must be true or false")
    await exchange.respond(await exchange.in_steps(_index(plane, readiness, exchange.account, only_ready)))


async def handle_load(plane: DataPlane, exchange: Exchange, target: ModelPath) -> None:
    """Load a model, and send an empty response once it is loaded."""
    check_repository(target.repository)
    body = await exchange.decompressed_body()
    fields, long = await _fields(exchange, body)
    request, files = await exchange.in_steps(load_from_json(target.model, fields, long))
    await plane.load_model(exchange.account, request, files)
    await exchange.respond(b"")


async def handle_unload(plane: DataPlane, exchange: Exchange, target: ModelPath) -> None:
    """Unload a model, and send an empty response once it is unloaded."""
    check_repository(target.repository)
    request = unload_request_from_json(target.model, await _object(exchange))
    await plane.unload_model(exchange.account, request)
    await exchange.respond(b"")


def _index(plane: DataPlane, readiness: Readiness, account: Account, only_ready: bool) -> Work[bytes]:
    """Return the index as JSON; the members of an entry are those that it has."""
    index = yield from kserve_messages.index_of(plane, readiness.is_model_ready, account, only_ready=only_ready)
    entries = []
    for entry in index:
        yield 0
        entries.append(orjson.dumps({name: value for name, value in to_json(entry).items() if value}))
    return b"[" + b",".join(entries) + b"]"


async def _fields(exchange: Exchange, body: bytes) -> tuple[dict[str, object], LongStrings]:
    """Return the members of a body, and the long strings in it, by what stands in their place."""
    if len(body) <= SHORT_BYTES:
        return await read_object(exchange, body) if body else {}, {}
    text, long = await exchange.in_steps(cut_strings(body))
    return await exchange.in_steps(object_of(text, exchange.settings.options)), long


async def _object(exchange: Exchange) -> dict[str, object]:
    body = await exchange.decompressed_body()
    return await read_object(exchange, body) if body else {}
