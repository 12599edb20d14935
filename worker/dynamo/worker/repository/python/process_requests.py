"""Requests as the process of a model gets them."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import DynamoError
from dynamo.common.tensors.check import MODELS_OWN
from dynamo.worker.repository.declared.execution import ModelRequest
from dynamo.worker.repository.python.codes import to_code
from dynamo.worker.repository.python.process_memory import ProcessMemory
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.raw_tensors import pack


def without_body(message: wire.Message, error: DynamoError) -> wire.Message:
    """Return what takes the place of a message whose tensors are not read."""
    match message:
        case wire.CallModel():
            return wire.CallModel(msgspec.structs.replace(message.request, inputs=()), refusal=str(error))
        case wire.Response():
            return wire.Response(number=message.number, error=str(error), code=to_code(error), final=message.final)
        case wire.Done():
            responses = tuple(without_body(response, error) if response.outputs else response for response in message.responses)
            return msgspec.structs.replace(message, responses=responses)
        case _:
            return message


def to_wire(
    number: int, request: ModelRequest, model: str, memory: ProcessMemory | None, *, has_room: bool
) -> tuple[wire.InferenceHead, list[wire.Buffer]]:
    """Return the head of a request and the tensors that follow it."""
    inputs: list[wire.TensorHead] = []
    raws: list[wire.Buffer] = []
    for tensor, raw in zip(*pack(request.inputs), strict=True):
        placed = None if memory is None else memory.place(tensor, raw)
        if placed is None:
            raws.append(raw)
        inputs.append(placed or tensor)
    head = wire.InferenceHead(
        number=number,
        model=model,
        version=request.context.version,
        request_id=request.id,
        outputs=tuple(request.outputs),
        inputs=tuple(inputs),
        room=memory.reserve(number) if memory is not None and has_room else None,
        **(_parameters_of(request) if request.parameters else {}),
    )
    return head, raws


def _parameters_of(request: ModelRequest) -> dict[str, Any]:
    """Return the fields of a head that parameters of the request set."""
    parameters = dict(request.parameters)
    correlation_id = parameters.pop("sequence_id", 0)
    head = {
        "correlation_id": correlation_id if isinstance(correlation_id, str) else _unsigned(correlation_id),
        "flags": int(bool(parameters.pop("sequence_start", False))) | 2 * int(bool(parameters.pop("sequence_end", False))),
        "priority": _unsigned(parameters.pop("priority", 0)),
        "timeout_us": _unsigned(parameters.pop("timeout", 0)),
    }
    for name, passed_as in MODELS_OWN.items():
        if passed_as in parameters:
            parameters[name] = parameters.pop(passed_as)
    return {**head, "parameters": parameters}


def _unsigned(value: object) -> int:
    """Return a number as the 64 bits without a sign that models see of it; 0 if it is none."""
    return value % 2**64 if isinstance(value, int) else 0
