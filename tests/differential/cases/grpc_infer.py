"""ModelInfer over gRPC: every datatype, every way to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.tensors import FIELDS, VALUES, echo, elements, raw, request, set_parameter
from tests.differential.server_client import Response, ServerClient

_KEYS = (
    *("custom", "", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"),
    *("triton_enable_empty_final_response", "triton_other", "Triton_x", "binary_data"),
)
_VALUES: tuple[object, ...] = (True, False, 0, 1, -1, 5, 2**63, 1.5, "text", "", None)
_CODES = ("INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "UNKNOWN", "raise")


def cases() -> Iterator[Case]:
    for family, group in (
        ("gRPC datatypes", _datatypes()),
        ("gRPC outputs", _outputs()),
        ("gRPC parameters", _parameters()),
        ("gRPC classification", _classification()),
        ("gRPC malformed", _malformed()),
        ("gRPC models", _models()),
    ):
        for what, message in group:
            yield Case(family, what, partial(_infer, message))


def _infer(message: pb.ModelInferRequest | bytes, client: ServerClient) -> Response:
    return client.call("ModelInfer", message)


Group = Iterator[tuple[str, pb.ModelInferRequest | bytes]]


def _datatypes() -> Group:
    for datatype in VALUES:
        for shape in ((3,), (1,), (0,)):
            yield f"{datatype} {shape} raw", echo(datatype, shape)
            if datatype in FIELDS:
                yield f"{datatype} {shape} typed", echo(datatype, shape, typed=True)
        with_id = echo(datatype, id="request é 1")
        yield f"{datatype} with an id", with_id
        for other in dict.fromkeys(FIELDS.values()):
            message = request(f"echo_{datatype.lower()}", ("INPUT0", datatype, (1,)))
            value = b"1" if other == "bytes_contents" else 1
            getattr(message.inputs[0].contents, other).append(value)
            if other != FIELDS.get(datatype):
                yield f"{datatype} in {other}", message
        for count in (0, 2, 4):
            message = echo(datatype)
            message.raw_input_contents[0] = raw(datatype, elements(datatype, count))
            yield f"{datatype} raw, {count} elements for 3", message
        message = echo(datatype)
        message.raw_input_contents[0] = message.raw_input_contents[0][:-1]
        yield f"{datatype} raw, one byte too few", message
        if datatype in FIELDS:
            for extra in (-1, 1):
                message = echo(datatype, (3,), typed=True)
                message.inputs[0].shape[0] += extra
                yield f"{datatype} typed, 3 elements for {3 + extra}", message
        message = echo(datatype)
        message.inputs[0].datatype = "FP64" if datatype != "FP64" else "FP32"
        yield f"{datatype} sent as another", message
    for datatype, value in (("INT8", 200), ("INT8", -129), ("INT16", 40000), ("UINT8", 256), ("UINT16", 65536), ("BOOL", 2)):
        message = request(f"echo_{datatype.lower()}", ("INPUT0", datatype, (1,)))
        getattr(message.inputs[0].contents, FIELDS[datatype]).append(value)
        yield f"{datatype} typed, {value}", message
    message = request("echo_bool", ("INPUT0", "BOOL", (3,)))
    message.raw_input_contents.append(b"\x00\x02\xff")
    yield "BOOL raw of 0, 2 and 255", message
    for what, data in (
        ("cut length", b"\x01\0"),
        ("cut element", b"\x05\0\0\0ab"),
        ("more after it", b"\x01\0\0\0ab"),
        ("huge length", b"\xff\xff\xff\xffab"),
        ("not UTF-8", b"\x02\0\0\0\xff\xfe"),
        ("NUL", b"\x03\0\0\0a\0b"),
    ):
        message = request("echo_bytes", ("INPUT0", "BYTES", (1,)))
        message.raw_input_contents.append(data)
        yield f"BYTES raw, {what}", message


def _outputs() -> Group:
    for names in (
        (),
        ("OUTPUT0",),
        ("OUTPUT1",),
        ("OUTPUT1", "OUTPUT0"),
        ("OUTPUT0", "OUTPUT0"),
        ("NONE",),
        ("",),
        ("OUTPUT0", "NONE"),
    ):
        for typed in (False, True):
            message = _two(typed=typed)
            for name in names:
                message.outputs.add(name=name)
            yield f"add_sub, typed={typed}, wanting {names}", message
    for model, version in (("versions", ""), ("versions", "1"), ("versions", "3"), ("versions", "2"), ("echo_fp32", "1")):
        message = echo("FP32", model=model)
        message.model_version = version
        yield f"{model} version {version!r}", message
    for version in ("9", "x", "-1", "0", "01", "1.5", "99999999999999999999", " 1"):
        message = echo("FP32")
        message.model_version = version
        yield f"version {version!r}", message
    for key, value in product(("binary_data", "custom", "classification", "shared_memory_region"), (True, 0, "x")):
        message = echo("FP32")
        set_parameter(message.outputs.add(name="OUTPUT0").parameters[key], value)
        yield f"an output with {key}={value!r}", message


def _parameters() -> Group:
    for key, value in product(_KEYS, _VALUES):
        message = _asking()
        set_parameter(message.parameters[key], value)
        yield f"{key}={value!r}", message
        message = _asking()
        set_parameter(message.inputs[0].parameters[key], value)
        if value in (True, "text", None):
            yield f"of an input {key}={value!r}", message
    for pairs in (
        {"sequence_id": 5, "sequence_start": True, "sequence_end": True},
        {"sequence_id": "five", "sequence_start": True},
        {"sequence_start": True},
        {"priority": 3, "timeout": 1000, "custom": "x", "other": 2.5},
    ):
        message = _asking(id="r1")
        for key, value in pairs.items():
            set_parameter(message.parameters[key], value)
        yield f"{pairs}", message
    message = _asking()
    message.outputs.add(name="OUTPUT0")
    yield "the names of wanted outputs", message


def _classification() -> Group:
    for model, count in product(("scores", "scores_batched", "scores_int"), (1, 2, 3, 5, 6, 100, 0, -1)):
        message = _scored(model)
        set_parameter(message.outputs.add(name="OUTPUT0").parameters["classification"], count)
        yield f"{model}, {count} classes", message
    for model, value in product(("scores", "scores_batched"), (True, "2", 2.0, 2**63, None)):
        message = _scored(model)
        set_parameter(message.outputs.add(name="OUTPUT0").parameters["classification"], value)
        yield f"{model}, {value!r} classes", message
    for datatype in VALUES:
        message = echo(datatype)
        set_parameter(message.outputs.add(name="OUTPUT0").parameters["classification"], 2)
        yield f"{datatype} without labels", message
        message = echo(datatype, (0,))
        set_parameter(message.outputs.add(name="OUTPUT0").parameters["classification"], 2)
        yield f"{datatype} without elements", message


def _malformed() -> Group:
    shape: tuple[int, ...]
    yield "no message", b"\xff\xff\xff"
    yield "an empty message", b""
    for model in ("", "unknown", "a b", "late", "broken", "repeat", "../x", "x" * 300):
        yield f"model {model[:20]!r}", echo("FP32", model=model) if model else request("", ("INPUT0", "FP32", (1,)))
    for datatype in ("", "fp32", "FLOAT", "TYPE_FP32", "INT128"):
        message = echo("FP32")
        message.inputs[0].datatype = datatype
        yield f"datatype {datatype!r}", message
    for shape in ((), (-1,), (-3,), (3, 1), (1, 3), (2**40,), (2**62, 4), (2**63 - 1,), (2**32, 2**32), (0, 3), (1,) * 20):
        message = echo("FP32")
        message.inputs[0].shape[:] = shape
        yield f"shape {shape}", message
    for model, shape in (
        *(("echo_batched", shape) for shape in ((1, 4), (4, 4), (5, 4), (0, 4), (4,), (1, 3), (1, 4, 1), (-1, 4), (), (1, 0))),
        *(("echo_matrix", shape) for shape in ((2, 3), (3, 2), (6,), (1, 2, 3), (2,), (2, 3, 1))),
        *(("echo_batched_bytes", shape) for shape in ((1, 3), (2, 2), (3, 1), (2, 0), (0, 2), (2,))),
        *(("echo_reshaped", shape) for shape in ((1, 1), (3, 1), (1,), (1, 1, 1), (4, 2))),
    ):
        datatype = {"echo_matrix": "INT32", "echo_batched_bytes": "BYTES"}.get(model, "FP32")
        message = echo(datatype, [max(0, dim) for dim in shape], model=model)
        message.inputs[0].shape[:] = shape
        yield f"{model} of {shape}", message
    for name in ("", "INPUT", "input0", "OUTPUT0"):
        message = echo("FP32")
        message.inputs[0].name = name
        yield f"an input named {name!r}", message
    for model, names in (
        ("add_sub", ()),
        ("add_sub", ("INPUT0",)),
        ("add_sub", ("INPUT1",)),
        ("add_sub", ("INPUT0", "INPUT0")),
        ("add_sub", ("INPUT0", "INPUT2")),
        ("add_sub", ("INPUT0", "INPUT1", "INPUT2")),
        ("add_sub", ("INPUT0", "INPUT1", "INPUT1")),
        ("add_sub", ("INPUT1", "INPUT0")),
        ("optional", ()),
        ("optional", ("INPUT0",)),
        ("optional", ("INPUT1",)),
        ("optional", ("INPUT0", "INPUT1")),
        ("optional", ("INPUT0", "INPUT0")),
        ("optional", ("INPUT0", "INPUT1", "INPUT2")),
        ("optional", ("INPUT0", "INPUT2")),
    ):
        datatype, shape = ("INT32", (1, 16)) if model == "add_sub" else ("FP32", (16,))
        message = request(model, *((name, datatype, shape) for name in names))
        message.raw_input_contents.extend([bytes(64)] * len(names))
        yield f"{model} with {names}", message
    different = _two()
    different.inputs[1].shape[0] = 2
    different.raw_input_contents[1] = bytes(128)
    yield "two inputs of different batches", different
    for count in (0, 1, 3):
        message = _two()
        del message.raw_input_contents[:]
        message.raw_input_contents.extend([bytes(64)] * count)
        yield f"two inputs and {count} raw tensors", message
    mixed = echo("FP32")
    mixed.inputs[0].contents.fp32_contents.extend([1, 2, 3])
    yield "raw and typed", mixed
    mixed = _two()
    mixed.raw_input_contents.pop()
    mixed.inputs[1].contents.int_contents.extend(range(16))
    yield "one raw, one typed", mixed
    empty = echo("FP32")
    del empty.raw_input_contents[:]
    yield "no data", empty
    empty = echo("FP32")
    del empty.raw_input_contents[:]
    empty.inputs[0].contents.SetInParent()
    yield "empty contents", empty
    both = request("echo_fp32", ("INPUT0", "FP32", (1,)))
    both.inputs[0].contents.fp32_contents.append(1)
    both.inputs[0].contents.fp64_contents.append(1)
    yield "two fields filled", both


def _models() -> Group:
    for code in _CODES:
        message = request("fails", ("INPUT0", "BYTES", (1,)))
        message.raw_input_contents.append(raw("BYTES", [code]))
        yield f"a model that fails with {code}", message
    yield "an ensemble", echo("FP32", model="chain", id="e")
    yield "a completed model", echo("FP32", model="completing")
    yield "a model with a dynamic batcher", echo("FP32", (2, 3), model="dynamic")
    yield "a decoupled model", echo("INT32", model="repeat")


def _two(*, typed: bool = False) -> pb.ModelInferRequest:
    message = request("add_sub", ("INPUT0", "INT32", (1, 16)), ("INPUT1", "INT32", (1, 16)))
    for tensor in message.inputs:
        if typed:
            tensor.contents.int_contents.extend(range(16))
        else:
            message.raw_input_contents.append(raw("INT32", range(16)))
    return message


def _asking(id: str = "") -> pb.ModelInferRequest:
    message = request("parameters", ("INPUT0", "INT32", (1,)), id=id)
    message.raw_input_contents.append(bytes(4))
    return message


def _scored(model: str) -> pb.ModelInferRequest:
    shape = (2, 1) if model == "scores_batched" else (1,)
    message = request(model, ("INPUT0", "FP32", shape))
    message.raw_input_contents.append(bytes(4 * shape[0]))
    return message
