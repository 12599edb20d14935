from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest, ModelNotFound, Unsupported
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.protos.inference_pb2 import InferTensorContents, ModelInferRequest

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


def strings_request(*counts: int) -> TensorRequest:
    request = ModelInferRequest(model_name="s")
    for name, count in zip("AB", counts, strict=True):
        request.inputs.add(name=name, datatype="BYTES", shape=[count])
        request.raw_input_contents.append(bytes(4 * count))
    return TensorRequest.parse(request.SerializeToString())


def test_a_request_has_at_most_a_million_strings_in_all_inputs() -> None:
    inputs = tuple(TensorSpec(name=name, datatype="BYTES", shape=(-1,)) for name in "AB")
    card = ModelCard(name="s", kind=ModelKind.TENSOR, inputs=inputs)
    RequestChecker(card).check(strings_request(500_000, 500_000))
    for counts in (500_000, 500_001), (1_000_001, 0):
        with pytest.raises(InvalidRequest, match="has 1000001 or more BYTES elements; at most 1000000 are allowed"):
            RequestChecker(card).check(strings_request(*counts))


@pytest.mark.parametrize("card", [CARD, BATCHED])
def test_a_shape_with_too_many_dimensions_is_not_listed(card: ModelCard) -> None:
    request = raw_request() if card is CARD else batched_request()
    request.inputs[0].shape.extend([2] * 1_000_000)
    with pytest.raises(InvalidRequest) as refused:
        RequestChecker(card).check(TensorRequest.parse(request.SerializeToString()))
    assert str(refused.value).endswith("input 'A' has 1000002 dimensions; at most 16 are allowed")


def batched_request(a: int = 2, b: int = 2) -> ModelInferRequest:
    request = ModelInferRequest(model_name="b")
    request.inputs.add(name="A", datatype="INT8", shape=[a, 2])
    request.inputs.add(name="B", datatype="INT8", shape=[b, 1])
    request.raw_input_contents.extend([bytes(max(a, 0) * 2), bytes(max(b, 0))])
    return request


def parsed(request: ModelInferRequest) -> TensorRequest:
    return TensorRequest.parse(request.SerializeToString())


@given(st.integers(0, 100), st.binary(min_size=1, max_size=3))
def test_a_changed_request_is_checked_without_crashing(position: int, change: bytes) -> None:
    data = bytearray(typed_request().SerializeToString())
    data[position % len(data) : position % len(data) + len(change)] = change
    with contextlib.suppress(InvalidRequest, ModelNotFound):
        RequestChecker(CARD).check(TensorRequest.parse(bytes(data)))


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
    third.parameters["headers"].string_param = "any"
    third.parameters["timeout"].int64_param = -1
    checker.check(parsed(third))


def test_the_id_of_a_sequence_has_at_most_128_characters() -> None:
    message = raw_request()
    message.parameters["sequence_id"].string_param = "s" * 128
    RequestChecker(CARD).check(parsed(message))
    message.parameters["sequence_id"].string_param += "s"
    with pytest.raises(Unsupported, match="string correlation ID cannot be longer than 128 characters"):
        RequestChecker(CARD).check(parsed(message))


def test_empty_tensors_need_no_elements() -> None:
    empty = typed_request()
    empty.inputs[0].shape[:] = [0, 2]
    del empty.inputs[0].contents.fp32_contents[:]
    RequestChecker(CARD).check(parsed(empty))


def test_a_tensor_without_a_shape_is_no_batch() -> None:
    message = batched_request()
    del message.inputs[0].shape[:]
    with pytest.raises(InvalidRequest, match="input 'A' has no shape but model requires batch dimension for 'b'"):
        RequestChecker(BATCHED).check(parsed(message))


def test_a_wrong_shape_of_a_batch_explains_batches() -> None:
    message = batched_request()
    message.inputs[0].shape.append(1)
    with pytest.raises(InvalidRequest, match="NOTE: Setting a non-zero max_batch_size"):
        RequestChecker(BATCHED).check(parsed(message))


Change = Callable[[ModelInferRequest], object]


def set_parameter(key: str, kind: str, value: object) -> Change:
    return lambda request: setattr(request.parameters[key], kind, value)


BAD_RAW: list[tuple[Change, str]] = [
    (
        lambda r: r.inputs.pop() and r.raw_input_contents.pop(),
        "[request id: 7] expected number of inputs between 2 and 3 but got 1 inputs for model 'm'. Got input(s) ['A'], but "
        "missing required input(s) ['B']. Please provide all required input(s).",
    ),
    (
        lambda r: (r.inputs.add(name="D"), r.inputs.add(name="E"), r.raw_input_contents.extend([b"", b""])),
        "between 2 and 3 but got 4 inputs for model 'm'. Got input(s) ['E','D','B','A'], but missing required input(s) [].",
    ),
    (lambda r: setattr(r.inputs[1], "name", "D"), "unexpected inference input 'D' for model 'm'"),
    (lambda r: setattr(r.inputs[1], "name", "A"), "[request id: 7] input 'A' already exists in request"),
    (lambda r: setattr(r.inputs[1], "name", "C"), "inference input 'C' data-type is 'BYTES', but model 'm' expects 'UINT8'"),
    (lambda r: setattr(r.inputs[0], "datatype", "FP64"), "input 'A' data-type is 'FP64', but model 'm' expects 'FP32'"),
    (lambda r: setattr(r.inputs[0], "datatype", "float"), "input 'A' data-type is '<invalid>', but model 'm' expects 'FP32'"),
    (lambda r: setattr(r.inputs[0], "datatype", ""), "data-type is '<invalid>'"),
    (
        lambda r: r.inputs[0].shape.__setitem__(1, 3),
        "[request id: 7] unexpected shape for input 'A' for model 'm'. Expected [-1,2], got [3,3]. ",
    ),
    (lambda r: r.inputs[0].shape.pop(), "Expected [-1,2], got [3]. "),
    (lambda r: r.inputs[0].shape.append(1), "Expected [-1,2], got [3,2,1]. "),
    (
        lambda r: r.inputs[0].shape.__setitem__(0, -1),
        "All input dimensions should be specified for input 'A' for model 'm', got [-1,2]",
    ),
    (
        lambda r: r.inputs[0].shape.__setitem__(0, -3),
        "input byte size mismatch for input 'A' for model 'm'. Expected -24, got 24",
    ),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2**62), "overflows 64 bits"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2**61), "input byte size mismatch for input 'A' for model 'm'"),
    (lambda r: r.inputs[0].shape.extend([1] * 20), "Expected [-1,2], got [3,2,1,1,1,1"),
    (
        lambda r: r.raw_input_contents.__setitem__(0, bytes(23)),
        "[request id: 7] input byte size mismatch for input 'A' for model 'm'. Expected 24, got 23",
    ),
    (lambda r: r.raw_input_contents.pop(), "unable to find data for input tensor 'B' for model 'm' in request."),
    (lambda r: r.raw_input_contents.append(b""), "raw_input_contents has 3 entries for 2 inputs"),
    (lambda r: r.ClearField("raw_input_contents"), "unable to find data for input tensor 'A' for model 'm' in request."),
    (
        lambda r: r.inputs[0].contents.SetInParent(),
        "contents field must not be specified when using raw_input_contents for 'A' for model 'm'",
    ),
    (
        lambda r: r.raw_input_contents.__setitem__(1, b"\1\0\0\0a"),
        "[request id: 7] expected 2 string elements for inference input 'B' for model 'm', got 1",
    ),
    (
        lambda r: r.raw_input_contents.__setitem__(1, b"\1\0\0\0a\xff\0\0\0a"),
        "incomplete string data for inference input 'B', expecting string of length 255 but only 1 bytes available",
    ),
    (
        lambda r: r.raw_input_contents.__setitem__(1, b"\1\0\0\0a\xff"),
        "incomplete string length indicator for inference input 'B' for model 'm', expecting 4 bytes but only 1 bytes available",
    ),
    (
        lambda r: r.raw_input_contents.__setitem__(1, bytes(40)),
        "unexpected number of string elements 3 for inference input 'B' for model 'm', expecting 2",
    ),
    (lambda r: r.outputs.add(name="Q"), "unexpected inference output 'Q' for model 'm'"),
    (lambda r: (r.outputs.add(name="Y"), r.outputs.add(name="Y")), "[request id: 7] output 'Y' already exists in request"),
    (lambda r: r.parameters["p"].SetInParent(), "invalid value type for 'p' parameter, expected int64_param, bool_param, or"),
    (set_parameter("p", "uint64_param", 1), "invalid value type for 'p' parameter"),
    (set_parameter("triton_x", "bool_param", True), "parameter keys starting with 'triton_' are reserved for Triton usage."),
    (
        set_parameter("sequence_start", "int64_param", 1),
        "invalid value type for 'sequence_start' parameter, expected bool_param.",
    ),
    (set_parameter("priority", "string_param", "1"), "for 'priority' parameter, expected int64_param or uint64_param."),
    (set_parameter("priority", "int64_param", -1), "invalid value for 'priority', expected value >= 0."),
    (set_parameter("timeout", "uint64_param", 1), "invalid value type for 'timeout' parameter, expected int64_param."),
    (set_parameter("triton_enable_empty_final_response", "int64_param", 1), "expected bool_param."),
    (
        lambda r: setattr(r.outputs.add(name="Y").parameters["classification"], "int64_param", 0),
        "invalid value for 'classification' parameter, expected >= 0",
    ),
    (
        lambda r: setattr(r.outputs.add(name="Y").parameters["classification"], "string_param", "2"),
        "invalid value type for 'classification' parameter, expected int64_param",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_RAW, ids=[sentence for _, sentence in BAD_RAW])
def test_a_bad_raw_request_is_explained(change: Change, sentence: str) -> None:
    message = raw_request()
    change(message)
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        RequestChecker(CARD).check(parsed(message))


BAD_TYPED: list[tuple[Change, str]] = [
    (
        lambda r: r.inputs[0].contents.fp32_contents.pop(),
        "input byte size mismatch for input 'A' for model 'm'. Expected 24, got 20",
    ),
    (
        lambda r: r.inputs[1].contents.bytes_contents.pop(),
        "expected 2 string elements for inference input 'B' for model 'm', got 1",
    ),
    (lambda r: r.inputs[0].ClearField("contents"), "unable to find data for input tensor 'A' for model 'm' in request."),
    (lambda r: r.inputs[0].contents.fp64_contents.append(1), "for model 'm', binary data was already supplied."),
    (
        lambda r: r.inputs[0].contents.CopyFrom(InferTensorContents(int_contents=[1] * 6)),
        "unexpected explicit tensor data for input tensor 'A' for model 'm' of type 'INT32', expected datatype 'FP32'",
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
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        RequestChecker(CARD).check(parsed(message))


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (5, 5, "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'b'"),
        (0, 0, "input byte size mismatch for input 'A' for model 'b'. Expected 2, got 0"),
        (2, 3, "input 'B' batch size does not match other inputs for 'b'"),
    ],
)
def test_batches_are_bounded_and_equal(a: int, b: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        RequestChecker(BATCHED).check(parsed(batched_request(a, b)))


def test_an_unknown_version_is_not_found() -> None:
    message = raw_request()
    message.model_version = "2"
    with pytest.raises(ModelNotFound, match="model 'm' has no version '2'"):
        RequestChecker(CARD).check(parsed(message))


def test_shared_memory_is_unsupported() -> None:
    message = raw_request()
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="input 'A' refers to shared memory"):
        RequestChecker(CARD).check(parsed(message))
