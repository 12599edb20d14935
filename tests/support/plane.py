"""Requests to a data plane by the names of models, as the APIs make them."""

from __future__ import annotations

from dynamo.common.messaging.buffers import Buffer
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation, TensorResponses


async def infer(plane: DataPlane, request: TensorRequest, call: Call) -> Buffer:
    head = request.head
    return await plane.infer(plane.model(call.account, head.model_name, head.model_version), request, call)


def infer_stream(plane: DataPlane, request: TensorRequest, call: Call) -> TensorResponses:
    head = request.head
    return plane.infer_stream(plane.model(call.account, head.model_name, head.model_version), request, call)


def generate(plane: DataPlane, request: TextRequest, call: Call) -> Generation:
    return plane.generate(plane.model(call.account, request.model), request, call)
