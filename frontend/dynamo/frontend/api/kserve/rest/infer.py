"""POST …/infer: tensors in, tensors out, through the same code as over gRPC."""

from __future__ import annotations

from functools import partial

from dynamo.common.logs import request_id as logged_id
from dynamo.common.model_card import ModelCard
from dynamo.common.reception import Edge
from dynamo.common.tensor_request import TensorRequest
from dynamo.common.tensors import Buffer
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.kserve.infer import call_for, infer
from dynamo.frontend.api.kserve.named import serve_by_name
from dynamo.frontend.api.kserve.placed import Places, fetch, is_placed, place_outputs
from dynamo.frontend.api.kserve.rest.bodies import JSON_LENGTH, split
from dynamo.frontend.api.kserve.rest.long_arrays import PIECE_BYTES
from dynamo.frontend.api.kserve.rest.paths import Target
from dynamo.frontend.api.kserve.rest.requests import read_request
from dynamo.frontend.api.kserve.rest.responses import ModelResponse, send_response, write_response
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane


async def handle_infer(plane: DataPlane, server: KserveServer, exchange: Exchange, target: Target) -> None:
    caller = Caller.read(exchange.account, exchange.headers.items(), progress=exchange.progress)
    exchange.request_id = caller.request_id
    exchange.explanation = caller.explanation
    body = await exchange.decompressed_body()
    card = plane.described(exchange.account, target.model, check_version(target.version))
    parts = split(body, exchange.headers.get(JSON_LENGTH))
    options, offload = exchange.settings.options, exchange.settings.offload
    reading = partial(read_request, parts, card, target.model, target.version, options.max_json_depth, options.max_json_values)
    request, form = await offload.run_if(len(parts.json) > PIECE_BYTES, reading)
    places: Places = {}
    if is_placed(request.head):
        request, places = fetch(request, server.regions)

    async def respond(request: TensorRequest, card: ModelCard, caller: Caller) -> Buffer:
        call = begin(server, exchange, caller, request, card, RequestType.UNARY)
        async with exchange.attended():
            return await infer(plane, request, card, call)

    response = await serve_by_name(plane, request, caller, respond)
    parsed = ModelResponse.parse(response)
    if places:
        place_outputs(parsed.head, parsed.raws, places)
    writes_long = len(response) > PIECE_BYTES and not form.all_binary(parsed.head)
    text, binary = await offload.run_if(writes_long, write_response, parsed, form, places)
    await send_response(exchange, text, binary)


def begin(
    server: KserveServer, exchange: Exchange, caller: Caller, request: TensorRequest, card: ModelCard, request_type: RequestType
) -> Call:
    """Return the call of a request, and set its id for the log and the response's headers."""
    caller = server.timed(caller, card.name, Edge.HTTP, exchange.began_ns, exchange.body_read_ns)
    call = call_for(request, card, caller, request_type)
    exchange.request_id = call.request_id
    logged_id.set(call.request_id)
    return call
