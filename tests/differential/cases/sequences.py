"""Requests of sequences: their ids, starts and ends, over gRPC, streams and REST."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.tensors import raw, request, set_parameter
from tests.differential.server_client import Response, ServerClient

Step = Mapping[str, object]
"""The parameters of one request, without its sequence's id."""
_START: Step = {"sequence_start": True}
_END: Step = {"sequence_end": True}
_BOTH: Step = {**_START, **_END}
_COURSES: Mapping[str, Sequence[Step]] = {
    "start, end": (_START, _END),
    "one request": (_BOTH,),
    "start, two more, end": (_START, {}, {}, _END),
    "no start": ({},),
    "an end alone": (_END,),
    "start twice": (_START, _START, _END),
    "another after the end": (_START, _END, {}),
    "start after the end": (_START, _END, _START, _END),
    "start that is false": ({"sequence_start": False}, _END),
    "start=1": ({"sequence_start": 1},),
    "start='true'": ({"sequence_start": "true"},),
    "end='x'": (_START, {"sequence_end": "x"}),
}
_MODELS = ("seq_direct", "seq_oldest", "seq_text", "seq_plain")

_ITERATIVE = tuple(f"iterative_{strategy}{kind}" for strategy in ("direct", "oldest") for kind in ("", "_decoupled"))
_BEGINNINGS: Mapping[str, Step] = {
    "no id": {},
    "start without an id": _START,
    "an id and start": {"sequence_id": True, **_START},
    "an id without start": {"sequence_id": True},
}


def cases() -> Iterator[Case]:
    ids = count(1000)
    for protocol, model, (what, course) in product(("gRPC", "REST", "stream"), _MODELS, _COURSES.items()):
        id = f"id-{next(ids)}" if model == "seq_text" else next(ids)
        yield Case(
            "sequences",
            f"{protocol} {model}: {what}",
            partial(_run, protocol, model, [{"sequence_id": id, **step} for step in course]),
        )
    for protocol, model, wrong in product(
        ("gRPC", "REST"), _MODELS, (None, 0, -1, 2**63 - 1, "", "0", "17", "x", "x" * 128, "x" * 129, True, 1.5)
    ):
        if protocol == "REST" and wrong in (-1, 1.5):
            continue
        if wrong == "x" * 128 and model != "seq_plain":
            continue  # it ends the model's process, or Triton
        steps = [{**({} if wrong is None else {"sequence_id": wrong}), **step} for step in (_BOTH,)]
        text = repr(wrong) if not isinstance(wrong, str) or len(wrong) < 20 else f"{len(wrong)} characters"
        yield Case("sequences", f"{protocol} {model}: the id {text}", partial(_run, protocol, model, steps))
    for protocol, shape in product(("gRPC", "REST"), ((2, 1), (0, 1), (1,), (1, 2), ())):
        steps = [{"sequence_id": next(ids), **_BOTH}]
        yield Case("sequences", f"{protocol} seq_direct: shape {shape}", partial(_shaped, protocol, "seq_direct", shape, steps))
    for model in ("echo_fp32", "seq_direct"):
        yield Case("sequences", f"a control as an input of {model}", partial(_with_control, model, next(ids)))
    for name in ("START", "CORRID", "READY"):
        yield Case("sequences", f"the control {name} as an output", partial(_wanting, name, next(ids)))
    for model, times, (what, step) in product(_ITERATIVE, (1, 3), _BEGINNINGS.items()):
        yield Case("sequences", f"{model}: {times} times, {what}", partial(_iterate, model, times, step, next(ids)))
    for model in ("seq_batched_direct", "seq_batched_oldest"):
        for what, flags, numbers in (("start", _START, (1, 2, 3)), ("two of three", {}, (1, 3)), ("end", _END, (1, 2, 3))):
            messages = [_message(model, number, {"sequence_id": number, **flags}) for number in numbers]
            yield Case("sequences", f"batches of {model}: {what}", partial(_together, messages))
        yield Case("sequences", f"batches of {model}: statistics", partial(_statistics, model))
    interleaved = [{"sequence_id": id, **step} for step in (_START, {}, _END) for id in (7001, 7002, 7003)]
    for protocol, model in product(("gRPC", "stream"), ("seq_direct", "seq_oldest")):
        yield Case("sequences", f"{protocol} {model}: three at once", partial(_run, protocol, model, interleaved))


def _together(messages: Sequence[pb.ModelInferRequest], client: ServerClient) -> Response:
    return client.interleaved(messages)


def _statistics(model: str, client: ServerClient) -> Response:
    return client.call("ModelStatistics", pb.ModelStatisticsRequest(name=model))


def _iterate(model: str, times: int, step: Step, id: int, client: ServerClient) -> Response:
    own = {**step, **({"sequence_id": id} if "sequence_id" in step else {})}
    message = _message(model, times, own)
    return client.stream([message]) if model.endswith("_decoupled") else client.call("ModelInfer", message)


def _run(kind: str, model: str, steps: Sequence[Step], client: ServerClient) -> Response:
    return _shaped(kind, model, (1, 1), steps, client)


def _shaped(kind: str, model: str, shape: Sequence[int], steps: Sequence[Step], client: ServerClient) -> Response:
    """Send the steps one after the other; return all responses as one."""
    elements = math.prod(shape)
    if kind == "stream":
        return client.stream([_message(model, number, step) for number, step in enumerate(steps)])
    responses = []
    for number, step in enumerate(steps):
        if kind == "gRPC":
            responses.append(client.call("ModelInfer", _message(model, number, step, shape)))
        else:
            tensor = {"name": "INPUT0", "datatype": "INT32", "shape": list(shape), "data": [number] * elements}
            body = {"id": str(number), "inputs": [tensor], "parameters": dict(step)}
            responses.append(client.rest("POST", f"/v2/models/{model}/infer", body))
    return joined(responses)


def joined(responses: Sequence[Response]) -> Response:
    """Return several responses as one: the last, with what the others say in its body."""
    *others, last = responses
    return replace(last, body=[*([one.status, one.words, one.body] for one in others), last.body])


def _message(model: str, number: int, step: Step, shape: Sequence[int] = (1, 1)) -> pb.ModelInferRequest:
    message = request(model, ("INPUT0", "INT32", shape), id=str(number))
    message.raw_input_contents.append(raw("INT32", [number] * math.prod(shape)))
    for key, value in step.items():
        set_parameter(message.parameters[key], value)
    return message


def _with_control(model: str, id: int, client: ServerClient) -> Response:
    message = _message(model, 0, {"sequence_id": id, **_BOTH})
    message.inputs.add(name="START", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append(raw("INT32", [1]))
    return client.call("ModelInfer", message)


def _wanting(name: str, id: int, client: ServerClient) -> Response:
    message = _message("seq_direct", 0, {"sequence_id": id, **_BOTH})
    message.outputs.add(name=name)
    return client.call("ModelInfer", message)
