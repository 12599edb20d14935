"""ModelStreamInfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.tensors import VALUES, echo, raw, request, set_parameter
from tests.differential.server_client import Response, ServerClient

_STATUS = {"triton_grpc_error": "true"}


def cases() -> Iterator[Case]:
    for what, requests, metadata in _streams():
        yield Case("stream", what, partial(_send, requests, metadata))
    for count in (1, 2, 3):
        yield Case("stream", f"a batch of a decoupled model, {count} requests", partial(_send_batch, count))
    yield Case("stream", "statistics of the batches of a decoupled model", _statistics_of_batches)


def _send(requests: Sequence[pb.ModelInferRequest], metadata: Mapping[str, str], client: ServerClient) -> Response:
    return client.stream(requests, metadata)


def _send_batch(count: int, client: ServerClient) -> Response:
    return client.interleaved(_batch(count))


def _batch(count: int) -> list[pb.ModelInferRequest]:
    messages = []
    for number in range(count):
        message = request("repeat_batched", ("INPUT0", "INT32", (1, 1)), id=str(number))
        message.raw_input_contents.append(raw("INT32", [number]))
        messages.append(message)
    return messages


def _statistics_of_batches(client: ServerClient) -> Response:
    return client.call("ModelStatistics", pb.ModelStatisticsRequest(name="repeat_batched"))


def _streams() -> Iterator[tuple[str, list[pb.ModelInferRequest], Mapping[str, str]]]:
    yield "no request", [], {}
    for datatype in VALUES:
        yield f"{datatype}", [echo(datatype, id="one")], {}
    yield "three requests in order", [echo("FP32", id=str(number)) for number in range(3)], {}
    for final, values in product((None, True, False), ([], [1], [1, 2, 3], [1, -1], [-1])):
        yield f"decoupled, {values}, final={final}", [_repeat(values, final)], {}
        if final is not None:
            single = echo("FP32", id="s")
            set_parameter(single.parameters["triton_enable_empty_final_response"], final)
            yield f"one response, final={final}, {values}", [single], {}
    wrong: dict[str, pb.ModelInferRequest] = {
        "an unknown model": echo("FP32", model="unknown", id="w"),
        "a model that is not loaded": echo("FP32", model="late", id="w"),
        "no model": request("", ("INPUT0", "FP32", (1,))),
        "a wrong datatype": echo("INT32", model="echo_fp32", id="w"),
        "a wrong shape": echo("FP32", (1, 3), model="echo_fp32", id="w"),
        "no input": request("echo_fp32", id="w"),
        "too few bytes": _short(),
        "a wrong version": _versioned("9"),
        "a malformed version": _versioned("x"),
        "an unknown output": _wanting("NONE"),
        "a reserved parameter": _with_parameter("triton_x", 1),
        "a wrong parameter": _with_parameter("priority", "x"),
        "a failing model": _failing("INTERNAL"),
        "a model that fails with NOT_FOUND": _failing("NOT_FOUND"),
        "a model that raises": _failing("raise"),
    }
    for (what, message), metadata in product(wrong.items(), ({}, _STATUS, {"triton_grpc_error": "false"})):
        yield f"{what}, {metadata}", [message], metadata
        yield f"{what} before another, {metadata}", [message, echo("FP32", id="next")], metadata
    for key, value in product(("sequence_id", "sequence_start", "priority", "timeout", "custom"), (True, 1, "x")):
        yield f"{key}={value!r}", [_with_parameter(key, value)], {}


def _repeat(values: Sequence[int], final: bool | None) -> pb.ModelInferRequest:
    message = request("repeat", ("INPUT0", "INT32", (len(values),)), id="r")
    message.raw_input_contents.append(raw("INT32", values))
    if final is not None:
        set_parameter(message.parameters["triton_enable_empty_final_response"], final)
    return message


def _short() -> pb.ModelInferRequest:
    message = echo("FP32", id="w")
    message.raw_input_contents[0] = b"\0"
    return message


def _versioned(version: str) -> pb.ModelInferRequest:
    message = echo("FP32", id="w")
    message.model_version = version
    return message


def _wanting(output: str) -> pb.ModelInferRequest:
    message = echo("FP32", id="w")
    message.outputs.add(name=output)
    return message


def _with_parameter(key: str, value: object) -> pb.ModelInferRequest:
    message = echo("FP32", id="w")
    set_parameter(message.parameters[key], value)
    return message


def _failing(code: str) -> pb.ModelInferRequest:
    message = request("fails", ("INPUT0", "BYTES", (1,)), id="w")
    message.raw_input_contents.append(raw("BYTES", [code]))
    return message
