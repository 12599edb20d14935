"""Bodies of KServe's REST requests and responses: JSON, binary tensors, compression."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import tracemalloc
import zlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, PayloadTooLarge
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import finish
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import DATATYPES, Buffer, DataType, datatype_named, decode_bytes, encode_bytes
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.compression import decompress
from dynamo.frontend.api.http.paths import PathTable
from dynamo.frontend.api.kserve.rest.bodies import Parts, accepted_encoding, split
from dynamo.frontend.api.kserve.rest.elements import to_json, to_raw
from dynamo.frontend.api.kserve.rest.long_tensors import long_tensor
from dynamo.frontend.api.kserve.rest.operations import kserve_operations
from dynamo.frontend.api.kserve.rest.paths import ModelPath
from dynamo.frontend.api.kserve.rest.requests import OutputForm, read_request
from dynamo.frontend.api.kserve.rest.responses import ModelResponse, write_response
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.config import HttpOptions
from dynamo.protos import inference_pb2 as pb

CARD = ModelCard(name="m", kind=ModelKind.TENSOR)
SIZED = {name: kind for name, kind in DATATYPES.items() if kind.size}


OPTIONS = HttpOptions(max_json_depth=20)
MIB = 2**20


def cut(body: bytes, length: str | None) -> Parts:
    return split(body, length, OPTIONS.max_tensor_json_bytes)


def parts(body: bytes, json_bytes: int | None = None) -> Parts:
    return cut(body, None if json_bytes is None else str(json_bytes))


def read_parts(of: Parts, card: ModelCard = CARD, options: HttpOptions = OPTIONS) -> tuple[TensorRequest, OutputForm]:
    return finish(read_request(of, card, "m", "", options))


def written(message: pb.ModelInferResponse, form: OutputForm) -> tuple[bytes, list[Buffer]]:
    text, tail = finish(write_response(ModelResponse.parse(message.SerializeToString()), form))
    return b"".join(text), tail


def read(message: object, tail: bytes = b"", card: ModelCard = CARD) -> tuple[TensorRequest, OutputForm]:
    text = json.dumps(message).encode()
    return read_parts(parts(text + tail, len(text)), card)


def one(datatype: str, shape: Sequence[int], data: object) -> bytes:
    """The raw form of a request's only tensor."""
    request, _ = read({"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}]})
    return bytes(request.raw_inputs[0])


def refused(datatype: str, shape: Sequence[int], data: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        one(datatype, shape, data)
    return str(caught.value)


@pytest.mark.parametrize(("datatype", "value"), [("FP32", 1.0), ("BOOL", True), ("BYTES", "a"), ("INT64", 1)])
def test_a_shape_of_a_tebi_of_elements_costs_no_memory(datatype: str, value: object) -> None:
    assert "1 elements in its contents where its shape needs 1099511627776" in refused(datatype, [2**40], [value])


# Binary tensors


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, list[int], bytes]:
    datatype = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    kind = datatype_named(datatype)
    if kind.size:
        return datatype, shape, draw(st.binary(min_size=count * kind.size, max_size=count * kind.size))
    return datatype, shape, encode_bytes(draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count)))


@given(st.lists(tensors(), max_size=5), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_binary_tensors_become_the_message_that_grpc_carries(found: list[tuple[str, list[int], bytes]], id_: str) -> None:
    inputs = [
        {"name": f"x{at}", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
        for at, (datatype, shape, raw) in enumerate(found)
    ]
    request, _ = read({"id": id_, "inputs": inputs}, b"".join(raw for _, _, raw in found))
    message = pb.ModelInferRequest.FromString(bytes(request.raw))
    want = pb.ModelInferRequest(model_name="m", id=id_)
    for at, (datatype, shape, raw) in enumerate(found):
        want.inputs.add(name=f"x{at}", datatype=datatype, shape=shape)
        want.raw_input_contents.append(raw)
    assert message == want


@given(st.lists(tensors(), max_size=5), st.data())
def test_a_response_equals_its_message_in_binary_and_in_json(
    found: list[tuple[str, list[int], bytes]], data: st.DataObject
) -> None:
    message = pb.ModelInferResponse(model_name="m", model_version="3", id="i")
    for at, (datatype, shape, raw) in enumerate(found):
        message.outputs.add(name=f"y{at}", datatype=datatype, shape=shape)
        message.raw_output_contents.append(raw)
    binary = {f"y{at}": data.draw(st.booleans()) or datatype == "BYTES" for at, (datatype, _, _) in enumerate(found)}
    text, tail = written(message, OutputForm(own=binary))
    response = json.loads(text)
    left = b"".join(map(bytes, tail))
    for (datatype, shape, raw), output in zip(found, response["outputs"], strict=True):
        assert (output["datatype"], output["shape"]) == (datatype, shape)
        if binary[output["name"]]:
            size = output["parameters"]["binary_data_size"]
            assert left[:size] == raw
            left = left[size:]
        else:
            bits = _bits(bytes(to_raw(output["data"], datatype_named(datatype), shape, "x")), datatype)
            assert bits == _bits(raw, datatype)
    assert not left


def _bits(raw: bytes, datatype: str) -> list[Any]:
    """The elements, with every NaN the same: JSON has one word for all of them."""
    if datatype == "BOOL":
        return [bool(byte) for byte in raw]
    if datatype == "BF16":
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, SIZED[datatype].dtype)
    return [str(value) for value in values.tolist()]


@given(st.lists(tensors(), min_size=1, max_size=3), st.data())
def test_a_body_that_was_tampered_with_is_refused_with_a_sentence_or_read(
    found: list[tuple[str, list[int], bytes]], data: st.DataObject
) -> None:
    inputs = [
        {"name": f"x{at}", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
        for at, (datatype, shape, raw) in enumerate(found)
    ]
    text = json.dumps({"inputs": inputs, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    body = bytearray(text + b"".join(raw for _, _, raw in found))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    garbled = bytes(body[: data.draw(st.integers(0, len(body)))])
    length = data.draw(st.one_of(st.integers(-3, len(body) + 3).map(str), st.text(max_size=25), st.just(str(len(text)))))
    try:
        request, _ = read_parts(cut(garbled, length))
    except InvalidRequest as error:
        assert str(error)
    else:
        assert pb.ModelInferRequest.FromString(bytes(request.raw)).model_name == "m"


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["inputs", "name", "shape", "datatype", "data", "parameters", "outputs", "id"]), inner, max_size=5
            )
        ),
        max_leaves=25,
    )
)
def test_any_json_is_a_request_or_is_refused_with_a_sentence(message: object) -> None:
    try:
        read(message)
    except InvalidRequest as error:
        assert str(error)


@pytest.mark.parametrize(
    ("tail", "size", "words"),
    [
        (bytes(12), 8, "unexpected additional input data for model 'm'"),
        (bytes(8), 12, "unexpected size for input 'x', expecting 4 additional bytes for model 'm'"),
        (bytes(8), 2**62, f"expecting {2**62 - 8} additional bytes"),
        (bytes(8), -1, "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (bytes(8), True, "non-unsigned-integer"),
        (bytes(8), 2**80, "non-unsigned-integer"),
        (bytes(8), "8", "non-unsigned-integer"),
        (bytes(8), 8.0, "non-unsigned-integer"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(tail: bytes, size: object, words: str) -> None:
    message = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": size}}]}
    with pytest.raises(InvalidRequest, match=words):
        read(message, tail)


def test_an_input_in_shared_memory_leaves_the_binary_data_to_the_others() -> None:
    shared = {"name": "x", "datatype": "UINT8", "shape": [4], "parameters": {"shared_memory_region": "r"}}
    binary = {"name": "y", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}}
    request, _ = read({"inputs": [shared, binary]}, b"ab")
    assert [bytes(raw) for raw in request.raw_inputs] == [b"ab"]


def test_a_dimension_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a dimension of more than 63 bits"):
        read({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [2**64], "parameters": {"binary_data_size": 0}}]})


def test_a_tensor_is_binary_or_json_but_not_both() -> None:
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1], "parameters": {"binary_data_size": 1}}
    with pytest.raises(InvalidRequest, match="both 'data' and 'binary_data_size'"):
        read({"inputs": [tensor]}, b"1")


def test_json_and_binary_tensors_may_be_mixed() -> None:
    first = {"name": "a", "datatype": "UINT8", "shape": [2], "data": [1, 2]}
    second = {"name": "b", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}}
    request, _ = read({"inputs": [first, second]}, b"\3\4")
    assert [bytes(raw) for raw in request.raw_inputs] == [b"\1\2", b"\3\4"]


@pytest.mark.parametrize("length", ["x", "", " ", "1.5", "²", "0x3", "\u0663", "--1"])
def test_a_header_length_that_is_no_integer_is_refused(length: str) -> None:
    with pytest.raises(InvalidRequest, match="which is no integer"):
        cut(b'{"a":1}x', length)


@pytest.mark.parametrize("length", ["-1", "9", "9" * 30, "0" * 30])
def test_a_header_length_outside_the_body_is_refused(length: str) -> None:
    with pytest.raises(InvalidRequest, match=r"inference header size should be in range \(0, 8\)"):
        cut(b'{"a":1}x', length)


@pytest.mark.parametrize("repeated", ['"id":"first","id":"second"', '"id":"first","parameters":{},"id":"second","id":"third"'])
def test_the_first_of_members_with_the_same_key_counts(repeated: str) -> None:
    twice = '{"name":"x","shape":[1],"shape":[2],"datatype":"INT32","data":[1],"data":[2,3]}'
    body = f'{{{repeated},"inputs":[{twice}],"inputs":[]}}'.encode()
    request, _ = read_parts(Parts(body, memoryview(b""), is_raw=False))
    assert request.head.id == "first"
    assert list(request.head.inputs[0].shape) == [1]
    assert bytes(request.raw_inputs[0]) == b"\1\0\0\0"


@pytest.mark.parametrize("data", [b'["\xf0x"]', b"[" * 5000 + b"]" * 5000])
def test_members_with_the_same_key_around_data_that_is_no_json_are_refused(data: bytes) -> None:
    body = b'{"id":"a","id":"b","inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":' + data + b"}]}"
    with pytest.raises(InvalidRequest):
        read_parts(Parts(body, memoryview(b""), is_raw=False))


def test_the_header_length_may_be_the_whole_body_or_nothing_of_it() -> None:
    assert cut(b"{}", "2") == Parts(b"{}", memoryview(b""), is_raw=False)
    assert cut(b"{}", None) == Parts(b"{}", memoryview(b""), is_raw=False)
    assert cut(b"ab", "0") == Parts(b"", memoryview(b"ab"), is_raw=True)


def test_the_requests_word_on_binary_outputs_counts_if_none_is_requested() -> None:
    outputs = [
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": False}},
        {"name": "c", "parameters": {"binary_data": True}},
    ]
    _, form = read({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert [form.is_binary(name) for name in "abc"] == [False, False, True]
    _, form = read({"inputs": [], "outputs": outputs})
    assert [form.is_binary(name) for name in "abc"] == [False, False, True]
    _, form = read({"inputs": [], "parameters": {"binary_data_output": True}})
    assert form.is_binary("a")


# Elements in JSON


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]])
def test_data_is_flat_or_nested_as_its_shape(data: object) -> None:
    assert one("INT16", [2, 3], data) == np.arange(1, 7, dtype=np.int16).tobytes()


@pytest.mark.parametrize(
    "data", [[[1, 2], [3, 4], [5, 6]], [[1, 2, 3], [4, 5], [6]], [[[1, 2, 3], [4, 5, 6]]], [[1, 2, 3, 4, 5, 6]]]
)
def test_data_nested_in_another_form_is_refused(data: object) -> None:
    assert "whose form is not the shape [2, 3]" in refused("INT16", [2, 3], data)


@pytest.mark.parametrize("data", [[], [1] * 5, [[1, 2, 3]], [[], []]])
def test_too_few_elements_are_refused(data: object) -> None:
    assert "where its shape needs 6" in refused("INT16", [2, 3], data)


def test_a_scalar_may_stand_alone() -> None:
    assert one("UINT8", [], 7) == one("UINT8", [], [7]) == b"\7"
    assert "not an array" in refused("UINT8", [1], 7)


@pytest.mark.parametrize("datatype", ["BOOL", "INT64", "FP16", "FP64", "BYTES"])
def test_a_tensor_may_have_no_elements(datatype: str) -> None:
    assert one(datatype, [0], []) == b""
    assert one(datatype, [2, 0], [[], []]) == b""


@pytest.mark.parametrize(("datatype", "kind"), [(name, kind) for name, kind in SIZED.items() if name[0] in "IU"])
def test_whole_numbers_keep_within_their_datatype(datatype: str, kind: Any) -> None:
    limits = np.iinfo(kind.dtype)
    ends = [int(limits.min), int(limits.max)]
    assert one(datatype, [2], ends) == np.array(ends, kind.dtype).tobytes()
    for value in (limits.min - 1, int(limits.max) + 1, -(2**70), 2**70):
        words = refused(datatype, [2], [0, value])
        assert str(value)[:10] in words
        assert words.endswith(f"at 1, outside the range of {datatype}")


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_numbers_that_are_no_numbers_have_words(datatype: str) -> None:
    raw = one(datatype, [3], [math.nan, math.inf, -math.inf])
    assert to_json(raw, datatype, [3], "x") == b"[NaN,Infinity,-Infinity]"


@pytest.mark.parametrize(("datatype", "above"), [("FP16", 70_000), ("BF16", 3.4e38 * 1.01), ("FP32", 1e39)])
def test_a_number_too_large_for_its_datatype_is_no_infinity(datatype: str, above: float) -> None:
    assert "outside the range" in refused(datatype, [2], [1.0, above])


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        *(("INT32", value) for value in (1.0, "1", True, None)),
        *(("FP32", value) for value in ("1", False, {"a": 1}, [1.0])),
        *(("BOOL", value) for value in (2, -1, "true", None)),
        *(("BYTES", value) for value in (1, None, {})),
    ],
)
def test_values_of_another_kind_are_refused(datatype: str, value: object) -> None:
    assert "'x'" in refused(datatype, [2], [value, value])


def test_flags_are_true_and_false_and_no_numbers() -> None:
    assert one("BOOL", [2], [True, False]) == b"\1\0"
    for number in (0, 1, 2):
        assert "'x'" in refused("BOOL", [1], [number])
    assert to_json(b"\1\0", "BOOL", [2], "x") == b"[true,false]"


def test_text_is_utf8_both_ways() -> None:
    raw = one("BYTES", [2], ["größe ☃ \0", ""])
    assert decode_bytes(raw, 2) == ["größe ☃ \0".encode(), b""]
    assert json.loads(to_json(raw, "BYTES", [2], "x")) == ["größe ☃ \0", ""]


def test_half_a_surrogate_pair_is_no_text() -> None:
    body = b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}'
    with pytest.raises(InvalidRequest):
        read_parts(parts(body))
    with pytest.raises(InvalidRequest):
        read_parts(parts(body.replace(b'"BYTES"', b'"BYTES", "parameters": {"NaN": NaN}')))


def test_bytes_that_are_not_utf8_must_be_requested_in_binary() -> None:
    with pytest.raises(InvalidRequest, match="not UTF-8 at element 1; request it with 'binary_data'"):
        to_json(encode_bytes([b"a", b"\xff"]), "BYTES", [2], "output 'y'")


def test_a_tensor_that_contradicts_itself_is_the_models_fault() -> None:
    with pytest.raises(EngineError):
        to_json(b"123", "FP32", [1], "output 'y'")


def test_a_typed_response_is_written_as_well() -> None:
    message = pb.ModelInferResponse(model_name="m", model_version="1")
    message.outputs.add(name="y", datatype="INT32", shape=[2], contents=pb.InferTensorContents(int_contents=[4, 5]))
    text, tail = written(message, OutputForm(own={}))
    assert (json.loads(text)["outputs"][0]["data"], tail) == ([4, 5], [])


def test_parameters_of_all_kinds_go_both_ways() -> None:
    given_ = {"b": True, "i": -(2**63), "u": float(2**64), "d": 0.5, "s": "größe"}
    request, _ = read({"inputs": [], "parameters": given_})
    message = pb.ModelInferResponse(parameters=request.head.parameters)
    text, _ = written(message, OutputForm())
    assert json.loads(text)["parameters"] == given_


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("p", None, "parameter 'p' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("p", [], "parameter 'p' has invalid type."),
        ("sequence_id", True, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ("sequence_start", 1, "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
        ("timeout", -1, "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("priority", "1", "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("binary_data_output", "yes", "Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean"),
        ("triton_x", 1, "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."),
    ],
)
def test_reserved_parameters_have_their_types_and_others_are_plain(key: str, value: object, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        read({"inputs": [], "parameters": {key: value}})


@pytest.mark.parametrize("value", [None, [], {}, 2**64, -(2**63) - 1])
def test_parameters_of_other_kinds_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="parameter 'p' of input 'x' must be"):
        read({"inputs": [{"name": "x", "datatype": "INT8", "shape": [0], "parameters": {"p": value}}]})


def test_json_deeper_than_allowed_is_refused() -> None:
    for body in (b'{"inputs": ' + b"[" * 21, b'{"inputs": [], "x": ' + b"[" * 21 + b"]" * 21 + b"}", b"[" * 200_000):
        with pytest.raises(InvalidRequest):
            read_parts(parts(body))


# A body that is the tensor


def raw(data: bytes, *inputs: TensorSpec, max_batch_size: int = 0) -> pb.ModelInferRequest:
    card = ModelCard(name="m", kind=ModelKind.TENSOR, inputs=inputs, max_batch_size=max_batch_size)
    request, form = read_parts(cut(data, "0"), card)
    assert form.is_binary("anything")
    return pb.ModelInferRequest.FromString(bytes(request.raw))


def test_a_raw_body_is_the_models_only_input() -> None:
    message = raw(bytes(24), TensorSpec(name="x", datatype="INT32", shape=(2, 3)))
    assert (message.inputs[0].name, list(message.inputs[0].shape)) == ("x", [2, 3])
    assert message.raw_input_contents[0] == bytes(24)
    assert list(raw(bytes(24), TensorSpec(name="x", datatype="FP32", shape=(-1, 2))).inputs[0].shape) == [3, 2]
    assert list(raw(bytes(24), TensorSpec(name="x", datatype="FP32", shape=(-1, -1)), max_batch_size=4).inputs[0].shape) == [1, 6]
    text = raw(b"hello", TensorSpec(name="x", datatype="BYTES", shape=(-1,)))
    assert (list(text.inputs[0].shape), text.raw_input_contents[0]) == ([1], encode_bytes([b"hello"]))
    optional = TensorSpec(name="o", datatype="FP32", shape=(1,), optional=True)
    assert [tensor.name for tensor in raw(bytes(4), TensorSpec(name="x", datatype="FP32", shape=(1,)), optional).inputs] == ["x"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "got 0 inputs in 'm'"),
        (
            (TensorSpec(name="a", datatype="INT8", shape=(1,)), TensorSpec(name="b", datatype="INT8", shape=(1,))),
            "got 2 inputs in 'm'",
        ),
        ((TensorSpec(name="x", datatype="FP32", shape=(-1, -1)),), "can have one variable dimension"),
        ((TensorSpec(name="x", datatype="FP32", shape=(-1, 3)),), "Expected 0, got 10"),
        ((TensorSpec(name="x", datatype="FP32", shape=(-1, 0)),), "Expected 0, got 10"),
        ((TensorSpec(name="x", datatype="BYTES", shape=(2,)),), "must have input shape \\[1\\]"),
    ],
)
def test_a_raw_body_without_a_definite_shape_is_refused(inputs: tuple[TensorSpec, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        raw(bytes(10), *inputs)


# Compression


@pytest.mark.parametrize(("encoding", "bits"), [("gzip", 31), ("deflate", 15)])
def test_a_body_that_explodes_stops_at_the_limit(encoding: str, bits: int) -> None:
    packer = zlib.compressobj(9, wbits=bits)
    bomb = b"".join([packer.compress(bytes(2**20)) for _ in range(16)]) + packer.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge, match="larger than 1000 bytes when decompressed"):
            decompress(bomb, encoding, 1000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    with pytest.raises(PayloadTooLarge, match="more than 100 times as large as its"):
        decompress(bomb, encoding, 16 * 2**20)


def test_the_bounds_of_decompression_are_allowed() -> None:
    assert decompress(gzip.compress(bytes(2**20)), "gzip", 2**20) == bytes(2**20)  # however well it is compressed
    body = b"".join(b"%d,0.25,null," % number for number in range(200_000))
    assert decompress(gzip.compress(body), "gzip", len(body)) == body


def test_broken_compression_is_refused() -> None:
    whole = gzip.compress(b"hello")
    for body in (b"", b"hello", whole[:-1], whole + b"x", zlib.compress(b"hello")):
        with pytest.raises(InvalidRequest):
            decompress(body, "gzip", 100)


@given(st.binary(max_size=60), st.sampled_from(["gzip", "deflate"]))
def test_any_bytes_are_decompressed_or_refused(body: bytes, encoding: str) -> None:
    try:
        assert len(decompress(body, encoding, 50)) <= 50
    except DynamoError as error:
        assert isinstance(error, InvalidRequest | PayloadTooLarge)


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("GZIP;Q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0", ""),
        ("gzip;q=0.1, identity;q=0.9", ""),
        ("br", ""),
        ("gzip;q=x", ""),
        (",;,=", ""),
    ],
)
def test_the_clients_favourite_compression_is_chosen(header: str, chosen: str) -> None:
    assert accepted_encoding(header) == chosen


# Long arrays


def long_raw(data: bytes, kind: DataType, shape: Sequence[int]) -> bytes:
    return b"".join(finish(long_tensor(memoryview(data), kind, shape, "x")).pieces)


def long_and_short(datatype: str, shape: Sequence[int], data: bytes) -> list[bytes]:
    """The raw form of data that is read in pieces, and of the same that is read at once."""
    kind = datatype_named(datatype)
    return [long_raw(data, kind, shape), bytes(to_raw(msgspec.Raw(data), kind, shape, "x"))]


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT32", [100_000], list(range(100_000))),
        ("FP32", [1, 100_000], [[number / 7 for number in range(100_000)]]),
        ("FP64", [50_000, 2], [[number, -number] for number in range(50_000)]),
        ("FP64", [3, 2, 20_000], [[[row + column] * 20_000 for column in range(2)] for row in range(3)]),
        ("BOOL", [2, 30_000], [[True] * 30_000, [False] * 30_000]),
        ("BYTES", [30_000], [f'a"],[{number}\\' for number in range(30_000)]),
        ("BYTES", [2], ["x" * 200_000, "[,]" * 50_000]),
        ("INT64", [0], []),
        ("INT8", [2, 40_000], [1] * 80_000),
    ],
)
def test_data_read_in_pieces_equals_data_read_at_once(datatype: str, shape: list[int], data: object) -> None:
    for separators in ((",", ":"), (" ,\n ", ":")):
        in_pieces, at_once = long_and_short(datatype, shape, json.dumps(data, separators=separators).encode())
        assert in_pieces == at_once


@pytest.mark.parametrize(
    ("shape", "data", "words"),
    [
        ([100_000], b"[" + b"1," * 99_998 + b"1]", "has 99999 elements in its contents where its shape needs 100000"),
        ([100_000], b"[" + b"1," * 199_999 + b"1]", "has more elements in its contents than the 100000"),
        ([100_000], b"[" + b"1," * 99_999 + b"300]", "has the value 300 at 99999, outside the range of INT8"),
        ([100_000], b"[" + b"1," * 100_000 + b"]", "is not JSON"),
        ([100_000], b"[" + b"1," * 60_000 + b",1]", "is not JSON"),
        ([100_000], b"[" + b"1," * 60_000 + b'"a",1]', "data that is not INT8"),
        ([2, 50_000], b"[[" + b"1," * 59_999 + b"1],[" + b"1," * 39_999 + b"1]]", "nested data whose form is not the shape"),
        ([50_000, 2], b"[" + b"[1],[1,1,1]," * 24_999 + b"[1],[1,1,1]]", "nested data whose form is not the shape"),
        ([1, 100_000], b"[" + b"1," * 60_000 + b"[" + b"1," * 60_000 + b"]]", "data that is not INT8"),
    ],
)
def test_errors_in_long_data_are_sentences(shape: list[int], data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        long_raw(data, datatype_named("INT8"), shape)


def test_a_request_with_long_arrays_equals_one_in_binary() -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(2, -1)
    long: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 30_000], "data": values.tolist()}
    short = {"name": "y", "datatype": "INT32", "shape": [2], "data": [7, 8]}
    request, _ = read({"id": "a", "inputs": [long, short, {**long, "name": "z"}], "parameters": {"p": "[[[[1]]]]"}})
    assert [bytes(raw) for raw in request.raw_inputs] == [values.tobytes(), np.array([7, 8], "<i4").tobytes(), values.tobytes()]
    assert request.head.parameters["p"].string_param == "[[[[1]]]]"


def test_words_for_numbers_are_read_in_long_data() -> None:
    data = b"[" + b"1.5," * 50_000 + b"NaN,-Infinity]"
    values = np.frombuffer(long_raw(data, datatype_named("FP32"), [50_002]), "<f4")
    assert np.isnan(values[-2])
    assert values[-1] == -np.inf


def test_a_long_response_is_written_like_a_short_one() -> None:
    values = np.linspace(0, 1, 100_000).astype("<f8")
    values[70_000] = np.nan
    text = to_json(values.tobytes(), "FP64", [100_000], "y")
    assert np.array_equal(np.array(json.loads(text)), values, equal_nan=True)
    texts = [f"é{number}" for number in range(70_000)]
    assert json.loads(to_json(encode_bytes(texts), "BYTES", [70_000], "y")) == texts


# Paths


def resource_of(raw_path: bytes) -> tuple[str, ModelPath] | None:
    """The template that a path matches, and what its parameters name."""
    table: PathTable[str] = PathTable()
    for operation in kserve_operations(cast(Any, None), Readiness(), KserveServer()):
        table.add(operation.path, operation.path)
    match = table.find(raw_path)
    return None if match is None else (match[0], ModelPath.of(match[1]))


@pytest.mark.parametrize(
    ("path", "template", "target"),
    [
        ("/v2", "/v2", ModelPath()),
        ("/v2/health/live", "/v2/health/live", ModelPath()),
        ("/v2/models/a", "/v2/models/{model:path}", ModelPath("a")),
        ("/v2/models/a/b.c/versions/3/infer", "/v2/models/{model:path}/versions/{version}/infer", ModelPath("a/b.c", "3")),
        ("/v2/models/a%2Finfer", "/v2/models/{model:path}", ModelPath("a/infer")),
        ("/v2/models/gr%C3%B6%C3%9Fe/versions/7", "/v2/models/{model:path}/versions/{version}", ModelPath("größe", "7")),
        ("/v2/models/versions/versions/1/ready", "/v2/models/{model:path}/versions/{version}/ready", ModelPath("versions", "1")),
        (
            "/v2/models/a/versions/1/generate_stream",
            "/v2/models/{model:path}/versions/{version}/generate_stream",
            ModelPath("a", "1"),
        ),
        ("/v2/models/stats", "/v2/models/stats", ModelPath()),
        ("/v2/models/ready", "/v2/models/{model:path}", ModelPath("ready")),
        ("/v2/repository/here/index", "/v2/repository/{repository}/index", ModelPath(repository="here")),
        ("/v2/repository/models/a/load", "/v2/repository/models/{model:path}/load", ModelPath("a")),
        ("/v2/models/a/trace/setting", "/v2/models/{model:path}/trace/setting", ModelPath("a")),
    ],
)
def test_a_path_names_a_resource(path: str, template: str, target: ModelPath) -> None:
    assert resource_of(path.encode()) == (template, target)


@pytest.mark.parametrize(
    "path", ["/v2/", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/a/", "/v2/health", "/v2/nothing"]
)
def test_other_paths_name_no_resource(path: str) -> None:
    assert resource_of(path.encode()) is None


@given(st.binary(max_size=40))
def test_any_path_is_parsed_or_refused(path: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        resource_of(b"/v2/" + path)
