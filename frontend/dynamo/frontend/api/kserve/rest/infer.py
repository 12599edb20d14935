"""POST …/infer: tensors in, tensors out, through the same code as over gRPC."""

from __future__ import annotations

from dynamo.common.logs import request_id as logged_id
from dynamo.common.model_card import ModelCard
from dynamo.common.tensor_request import TensorRequest
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.kserve.infer import call_for, infer
from dynamo.frontend.api.kserve.rest.bodies import JSON_LENGTH, read_body, split
from dynamo.frontend.api.kserve.rest.paths import Target
from dynamo.frontend.api.kserve.rest.requests import read_request
from dynamo.frontend.api.kserve.rest.responses import ModelResponse, send_response, write_response
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane


async def handle_infer(plane: DataPlane, exchange: Exchange, target: Target) -> None:
    caller = Caller.read(exchange.account, exchange.headers.items(), progress=exchange.progress)
    exchange.request_id = caller.request_id
    exchange.explanation = caller.explanation
    body = await read_body(exchange)
    card = plane.card(exchange.account, target.model, target.version)
    parts = split(body, exchange.headers.get(JSON_LENGTH))
    request, form = read_request(parts, card, target.model, target.version, exchange.settings.options.max_json_depth)
    call = begin(exchange, caller, request, card, RequestType.UNARY)
    async with exchange.attended():
        response = await infer(plane, request, card, call)
    await send_response(exchange, *write_response(ModelResponse.parse(response), form))


def begin(exchange: Exchange, caller: Caller, request: TensorRequest, card: ModelCard, request_type: RequestType) -> Call:
    """Return the call of a request, and set its id for the log and the response's headers."""
    call = call_for(request, card, caller, request_type)
    exchange.request_id = call.request_id
    logged_id.set(call.request_id)
    return call
