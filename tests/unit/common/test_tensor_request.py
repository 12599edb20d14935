from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest, ModelNotFound, Unsupported
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensor_request import SMALL_BYTES, RequestChecker, TensorRequest, build_response, check_request
from dynamo.common.tensors import encode_bytes
from dynamo.protos.inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse

CARD = ModelCard(
    name="m",
    kind=ModelKind.TENSOR,
    versions=("1", "3"),
    inputs=(
        TensorSpec(name="A", datatype="FP32", shape=(-1, 2)),
        TensorSpec(name="B", datatype="BYTES", shape=(-1,)),
        TensorSpec(name="C", datatype="UINT8", shape=(2, 2), optional=True),
    ),
    outputs=(TensorSpec(name="Y", datatype="FP32", shape=(-1,)), TensorSpec(name="Z", datatype="FP32", shape=(-1,))),
)
BATCHED = ModelCard(
    name="b",
    kind=ModelKind.TENSOR,
    max_batch_size=4,
    inputs=(
        TensorSpec(name="A", datatype="INT8", shape=(-1, 2)),
        TensorSpec(name="B", datatype="INT8", shape=(-1, 1)),
    ),
    outputs=(),
)


def raw_request() -> ModelInferRequest:
    """A good one, raw."""
    request = ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="A", datatype="FP32", shape=[3, 2])
    request.inputs.add(name="B", datatype="BYTES", shape=[2])
    request.raw_input_contents.extend([bytes(24), encode_bytes(["a\0", "ü"])])
    return request


def typed_request() -> ModelInferRequest:
    """The same, typed."""
    request = raw_request()
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend([0.0] * 6)
    request.inputs[1].contents.bytes_contents.extend([b"a\0", "ü".encode()])
    return request


def batched_request(a: int = 2, b: int = 2) -> ModelInferRequest:
    request = ModelInferRequest(model_name="b")
    request.inputs.add(name="A", datatype="INT8", shape=[a, 2])
    request.inputs.add(name="B", datatype="INT8", shape=[b, 1])
    request.raw_input_contents.extend([bytes(max(a, 0) * 2), bytes(max(b, 0))])
    return request


def parsed(request: ModelInferRequest) -> TensorRequest:
    return TensorRequest.parse(request.SerializeToString())


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
def test_parsing_splits_a_message_of_any_size(padding: int) -> None:
    message = raw_request()
    message.parameters["p"].string_param = "x"
    message.raw_input_contents.append(bytes(padding))
    request = parsed(message)
    assert [bytes(raw) for raw in request.raw_inputs] == list(message.raw_input_contents)
    del message.raw_input_contents[:]
    assert request.head == message
    again = TensorRequest.build(request.head, request.raw_inputs)
    assert TensorRequest.parse(again.raw).raw_inputs == request.raw_inputs


def test_a_large_tensor_is_not_copied() -> None:
    message = ModelInferRequest(raw_input_contents=[b"x" * SMALL_BYTES, b"yz"]).SerializeToString()
    first, second = TensorRequest.parse(message).raw_inputs
    assert isinstance(first, memoryview)
    assert first.obj is message
    assert bytes(second) == b"yz"


def test_tensors_are_found_wherever_they_are_in_the_message() -> None:
    first = ModelInferRequest(raw_input_contents=[b"x" * SMALL_BYTES]).SerializeToString()
    rest = ModelInferRequest(model_name="m", raw_input_contents=[b"y"]).SerializeToString()
    unknown = b"\xa0\x06\x96\x01" + b"\xa5\x06abcd" + b"\xa1\x06abcdefgh"  # field 100 as varint, fixed32, fixed64
    request = TensorRequest.parse(first + unknown + rest)
    assert request.head.model_name == "m"
    assert [len(raw) for raw in request.raw_inputs] == [SMALL_BYTES, 1]


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_a_request_or_an_invalid_one(data: bytes, large: bool) -> None:
    if large:
        data += ModelInferRequest(raw_input_contents=[bytes(SMALL_BYTES)]).SerializeToString()
    try:
        request = TensorRequest.parse(data)
        check_request(request, CARD)
    except (InvalidRequest, ModelNotFound):
        pass


@given(st.integers(0, 100), st.binary(min_size=1, max_size=3))
def test_a_changed_request_is_checked_without_crashing(position: int, change: bytes) -> None:
    data = bytearray(typed_request().SerializeToString())
    data[position % len(data) : position % len(data) + len(change)] = change
    with contextlib.suppress(InvalidRequest, ModelNotFound):
        check_request(TensorRequest.parse(bytes(data)), CARD)


@given(st.data())
def test_both_ways_of_parsing_agree(data: st.DataObject) -> None:
    message = data.draw(st.binary(max_size=60))
    tail = ModelInferRequest(raw_input_contents=[bytes(SMALL_BYTES)]).SerializeToString()
    try:
        large = TensorRequest.parse(message + tail)
    except InvalidRequest:
        return
    whole = ModelInferRequest.FromString(message + tail)
    assert [bytes(raw) for raw in large.raw_inputs] == list(whole.raw_input_contents)


def test_more_tensors_than_any_model_has_are_refused_while_parsing() -> None:
    with pytest.raises(InvalidRequest, match="more than 4096 entries"):
        TensorRequest.parse(b"\x3a\x00" * SMALL_BYTES)


def test_good_requests_pass() -> None:
    checker = RequestChecker(CARD)
    checker.check(parsed(raw_request()))
    checker.check(parsed(typed_request()))
    RequestChecker(BATCHED).check(parsed(batched_request()))
    third = raw_request()
    third.inputs.add(name="C", datatype="UINT8", shape=[2, 2])
    third.raw_input_contents.append(bytes(4))
    third.model_version = "3"
    third.outputs.add(name="Z").parameters["classification"].int64_param = 1
    third.parameters["anything"].double_param = 1.5
    third.parameters["sequence_id"].string_param = "s"
    third.parameters["priority"].uint64_param = 1
    checker.check(parsed(third))


def test_empty_tensors_need_no_data() -> None:
    empty = typed_request()
    empty.inputs[0].shape[:] = [0, 2]
    empty.inputs[0].ClearField("contents")
    check_request(parsed(empty), CARD)


def test_empty_contents_beside_raw_data_are_tolerated() -> None:
    request = raw_request()
    request.inputs[0].contents.SetInParent()
    check_request(parsed(request), CARD)


Change = Callable[[ModelInferRequest], object]


def set_parameter(key: str, kind: str, value: object) -> Change:
    return lambda request: setattr(request.parameters[key], kind, value)


BAD_RAW: list[tuple[Change, str]] = [
    (lambda r: r.inputs.pop(), "input 'B' of model 'm' is missing"),
    (lambda r: r.ClearField("inputs"), "input 'A' of model 'm' is missing"),
    (lambda r: (r.inputs.add(name="D"), r.raw_input_contents.append(b"")), "model 'm' has no input 'D'; it has 'A', 'B', 'C'"),
    (lambda r: setattr(r.inputs[1], "name", "D"), "has no input 'D'"),
    (lambda r: setattr(r.inputs[1], "name", "A"), "input 'A' is given twice"),
    (lambda r: r.inputs.extend([r.inputs[0], r.inputs[0]]), "input 'A' is given twice"),
    (lambda r: setattr(r.inputs[1], "name", "C"), "has the datatype BYTES; the model takes UINT8"),
    (lambda r: setattr(r.inputs[0], "datatype", "FP64"), "input 'A' has the datatype FP64; the model takes FP32"),
    (lambda r: setattr(r.inputs[0], "datatype", "float"), "input 'A' has the unknown datatype 'float'; expected one of"),
    (lambda r: setattr(r.inputs[0], "datatype", ""), "input 'A' has the unknown datatype ''"),
    (lambda r: r.inputs[0].shape.__setitem__(1, 3), r"input 'A' has the shape \[3, 3\]; the model takes \[-1, 2\]"),
    (lambda r: r.inputs[0].shape.pop(), r"the shape \[3\]; the model takes"),
    (lambda r: r.inputs[0].shape.append(1), r"the shape \[3, 2, 1\]"),
    (lambda r: r.inputs[0].shape.__setitem__(0, -1), "the negative dimension -1"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2**62), "overflows 64 bits"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2**61), "whose size overflows 64 bits"),
    (lambda r: r.inputs[0].shape.extend([1] * 20), "22 dimensions; at most 16"),
    (lambda r: r.raw_input_contents.__setitem__(0, bytes(23)), "input 'A' has 23 bytes of raw data where FP32 .* needs 24"),
    (lambda r: r.raw_input_contents.pop(), "raw_input_contents has 1 entries for 2 inputs"),
    (lambda r: r.raw_input_contents.append(b""), "raw_input_contents has 3 entries for 2 inputs"),
    (lambda r: r.ClearField("raw_input_contents"), "input 'A' has no data, neither in contents nor in raw"),
    (lambda r: r.inputs[0].contents.fp32_contents.append(1), "input 'A' has contents although the request has raw"),
    (lambda r: r.raw_input_contents.__setitem__(1, b"\1\0\0\0a"), "input 'B' has 1 BYTES elements where its shape needs 2"),
    (lambda r: r.raw_input_contents.__setitem__(1, b"\xff\0\0\0a"), "input 'B' has a BYTES element 0 of 255 bytes"),
    (lambda r: r.outputs.add(name="Q"), "model 'm' has no output 'Q'; it has 'Y', 'Z'"),
    (lambda r: (r.outputs.add(name="Y"), r.outputs.add(name="Y")), "output 'Y' is requested twice"),
    (lambda r: r.parameters["p"].SetInParent(), "parameter 'p' has no value"),
    (lambda r: r.inputs[0].parameters["p"].SetInParent(), "parameter 'p' of input 'A' has no value"),
    (lambda r: r.outputs.add(name="Y").parameters["p"].SetInParent(), "parameter 'p' of output 'Y' has no value"),
    (set_parameter("triton_x", "bool_param", True), "parameter 'triton_x' is reserved"),
    (set_parameter("headers", "string_param", "x"), "parameter 'headers' is reserved"),
    (set_parameter("binary_data_output", "bool_param", True), "parameter 'binary_data_output' is reserved"),
    (set_parameter("sequence_start", "int64_param", 1), "parameter 'sequence_start' must be given as bool_param"),
    (set_parameter("priority", "string_param", "1"), "parameter 'priority' must be given as int64_param or uint64_param"),
    (set_parameter("timeout", "int64_param", -1), "parameter 'timeout' is -1; it must not be negative"),
    (set_parameter("triton_enable_empty_final_response", "int64_param", 1), "must be given as bool_param"),
    (
        lambda r: setattr(r.outputs.add(name="Y").parameters["classification"], "int64_param", 0),
        "parameter 'classification' of output 'Y' must be a positive int64_param",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_RAW, ids=[sentence for _, sentence in BAD_RAW])
def test_a_bad_raw_request_is_explained(change: Change, sentence: str) -> None:
    message = raw_request()
    change(message)
    with pytest.raises(InvalidRequest, match=sentence):
        check_request(parsed(message), CARD)


BAD_TYPED: list[tuple[Change, str]] = [
    (lambda r: r.inputs[0].contents.fp32_contents.pop(), "input 'A' has 5 elements in its contents where its shape needs 6"),
    (lambda r: r.inputs[0].ClearField("contents"), "input 'A' has no data"),
    (lambda r: r.inputs[0].contents.int_contents.append(1), "input 'A' fills int_contents and fp32_contents"),
    (
        lambda r: r.inputs[0].contents.CopyFrom(InferTensorContents(int_contents=[1] * 6)),
        "input 'A' is FP32 and belongs in fp32_contents, not in int_contents",
    ),
    (
        lambda r: r.inputs.add(
            name="C", datatype="UINT8", shape=[2, 2], contents=InferTensorContents(uint_contents=[0, 0, 300, 0])
        ),
        "input 'C' has the value 300 at 2, outside the range of UINT8",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_TYPED, ids=[sentence for _, sentence in BAD_TYPED])
def test_a_bad_typed_request_is_explained(change: Change, sentence: str) -> None:
    message = typed_request()
    change(message)
    with pytest.raises(InvalidRequest, match=sentence):
        check_request(parsed(message), CARD)


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (5, 5, "input 'A' has a batch of 5; model 'b' takes 1 to 4"),
        (0, 0, "a batch of 0"),
        (2, 3, "input 'B' has a batch of 3 where an input before it has 2"),
    ],
)
def test_batches_are_bounded_and_equal(a: int, b: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        check_request(parsed(batched_request(a, b)), BATCHED)


def test_an_unknown_version_is_not_found() -> None:
    message = raw_request()
    message.model_version = "2"
    with pytest.raises(ModelNotFound, match="model 'm' has no version '2'"):
        check_request(parsed(message), CARD)


def test_shared_memory_is_unsupported() -> None:
    message = raw_request()
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="input 'A' refers to shared memory"):
        check_request(parsed(message), CARD)


def test_the_parameters_that_steer_serving_are_read() -> None:
    message = raw_request()
    assert not parsed(message).wants_empty_final_response
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.parameters["priority"].uint64_param = 2
    message.parameters["timeout"].int64_param = 5000
    request = parsed(message)
    assert (request.wants_empty_final_response, request.priority, request.timeout_us) == (True, 2, 5000)
    assert not request.is_typed
    assert parsed(typed_request()).is_typed


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(0, 2 * SMALL_BYTES))
def test_a_response_in_pieces_is_what_protobuf_would_write(raws: list[bytes], size: int) -> None:
    head = ModelInferResponse(model_name="m", id="1")
    raws = [*raws, bytes(size)]
    pieces = build_response(head, raws)
    assert ModelInferResponse.FromString(b"".join(pieces)) == ModelInferResponse(model_name="m", id="1", raw_output_contents=raws)
    if size > SMALL_BYTES:
        assert any(piece is raws[-1] for piece in pieces)
