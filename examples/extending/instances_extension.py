"""A KServe extension: which instances serve a model, over gRPC and over REST.

    gRPC  ModelInstances(ModelReadyRequest) → RepositoryIndexResponse, one entry per instance
    REST  GET /v2/models/{model}/instances

Both protocols give what one function makes from the data plane. The example borrows messages that exist; an extension that stays
has messages of its own in `protos/dynamo/protos/inference.proto`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.kserve.declarations import METADATA
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.words import KSERVE_ERRORS
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.statuses import grpc_status, public_message
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.protos.inference_pb2 import ModelReadyRequest, RepositoryIndexResponse


def instances_of(plane: DataPlane, account: Account, model: str) -> list[str]:
    """Return the ids, in hex, of the instances that serve `model`. Raises ModelNotFound, Forbidden."""
    name = plane.card(account, model).name
    return sorted(f"{instance.id:x}" for instance in plane.models.instances(name))


def instance_methods(plane: DataPlane, account: Callable[[], Account]) -> list[GrpcOperation]:
    """Return the gRPC side, from bytes to bytes; in `KserveService` it would be one more of `operations`."""

    async def model_instances(message: bytes | PendingMessage, context: Context) -> bytes:
        try:
            request = ModelReadyRequest.FromString(await read_message(message))
            response = RepositoryIndexResponse()
            for instance in instances_of(plane, account(), request.name):
                response.models.add(name=instance, state="READY")
            return response.SerializeToString()
        except Exception as error:
            await context.abort(grpc_status(error), public_message(error))

    return [
        GrpcOperation(
            path="/inference.GRPCInferenceService/ModelInstances",
            declared=METADATA,
            handle=model_instances,
        )
    ]


def instance_operations(plane: DataPlane) -> list[Operation]:
    """Return the REST side."""

    async def model_instances(exchange: Exchange) -> None:
        model = ModelPath.of(exchange.parameters).model
        instances = instances_of(plane, exchange.account, model)
        await exchange.respond(msgspec.json.encode({"name": model, "instances": instances}))

    return [
        Operation(
            path="/v2/models/{model:path}/instances",
            method="GET",
            declared=METADATA,
            errors=KSERVE_ERRORS,
            handle=model_instances,
            summary="The instances that serve a model",
            group="KServe",
        )
    ]
