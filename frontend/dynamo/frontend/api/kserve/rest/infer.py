"""POST …/infer: tensors in, tensors out, through the same code as over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable

from dynamo.common.errors import PayloadTooLarge
from dynamo.common.observability.reception import EdgeProtocol
from dynamo.common.process.work import finish
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.kserve.infer import call_for, infer, serve
from dynamo.frontend.api.kserve.placed import Places, is_placed, place_outputs
from dynamo.frontend.api.kserve.rest.bodies import JSON_LENGTH, SEND_BINARY, split
from dynamo.frontend.api.kserve.rest.long_arrays import SHORT_BYTES
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.requests import read_request
from dynamo.frontend.api.kserve.rest.responses import ModelResponse, send_response, write_response
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.model_catalog import NamedModel


async def handle_infer(plane: DataPlane, server: KserveServer, exchange: Exchange, target: ModelPath) -> None:
    call = exchange.call(has_own_id=True)
    parts = split(await _body(exchange), exchange.headers.get(JSON_LENGTH), exchange.settings.options.max_tensor_json_bytes)
    card = plane.described(exchange.account, target.model, check_version(target.version))
    reading = read_request(parts, card, target.model, target.version, exchange.settings.options)
    places: Places = {}

    def respond(model: NamedModel, call: Call) -> Awaitable[Buffer]:
        nonlocal places
        named = request.renamed(model.name)
        placed = server.find_places(named, exchange.account, exchange.peer) if is_placed(named.head) else None
        places = {} if placed is None else placed.places
        call = begin(server, exchange, call, named, model, RequestType.UNARY)
        return infer(plane, model, named, call, placed)

    async with exchange.attended():
        is_short = len(parts.json) + len(parts.binary) <= SHORT_BYTES
        request, form = finish(reading) if is_short else await exchange.in_steps(reading)
        del parts, reading  # the body, which is not needed while the model runs
        response = await serve(plane, call, request, respond)
        parsed = ModelResponse.parse(response)
        if places:
            place_outputs(parsed.head, parsed.raws, places)
        writes_long = len(response) > SHORT_BYTES and not form.all_binary(parsed.head)
        if writes_long:
            exchange.hold(len(response))
        writing = write_response(parsed, form, places, Spliced() if writes_long else None)
        text, binary = await exchange.in_steps(writing) if writes_long else finish(writing)
    await send_response(exchange, text, binary, held_bytes=sum(map(len, text)) if writes_long else 0)


async def _body(exchange: Exchange) -> bytes:
    """Return the body. Raises PayloadTooLarge, before it is read, for one that has more JSON than is allowed."""
    options = exchange.settings.options
    if JSON_LENGTH in exchange.headers:
        return await exchange.decompressed_body()
    try:
        return await exchange.decompressed_body(min(options.max_tensor_json_bytes, options.max_body_bytes))
    except PayloadTooLarge as error:
        raise PayloadTooLarge(f"{error}; {SEND_BINARY}") from None


def begin(
    server: KserveServer,
    exchange: Exchange,
    call: Call,
    request: TensorRequest,
    model: NamedModel,
    request_type: RequestType,
) -> Call:
    """Return the call of a request, and set its id for the log and the response's headers."""
    call = server.timed(call, model.card.name, EdgeProtocol.HTTP, exchange.began_ns, exchange.body_read_ns)
    call = call_for(request, model, call, request_type)
    exchange.identify(call.request_id)
    return call
