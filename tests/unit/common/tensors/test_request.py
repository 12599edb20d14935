from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors.message_limits import MessageScanner
from dynamo.common.tensors.request import MAX_TENSORS, SMALL_BYTES, TensorRequest, build_response, parse_response
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.protos.inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse


def raw_request() -> ModelInferRequest:
    """A good one, raw."""
    request = ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="A", datatype="FP32", shape=[3, 2])
    request.inputs.add(name="B", datatype="BYTES", shape=[2])
    request.raw_input_contents.extend([bytes(24), encode_bytes(["a\0", "ü"])])
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
    with contextlib.suppress(InvalidRequest):
        TensorRequest.parse(data)


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


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_inputs_and_outputs_of_clients_are_counted_while_parsing(kind: str, padding: int) -> None:
    message = ModelInferRequest(model_name="m", id="x" * padding)
    for _ in range(MAX_TENSORS):
        getattr(message, kind).add()
    scanner = MessageScanner(ModelInferRequest)
    assert len(getattr(TensorRequest.parse(message.SerializeToString(), scanner).head, kind)) == MAX_TENSORS
    getattr(message, kind).add()
    with pytest.raises(InvalidRequest, match=f"the request has 4097 {kind}; at most 4096 are allowed"):
        TensorRequest.parse(message.SerializeToString(), scanner)


def test_the_parameters_that_steer_serving_are_read() -> None:
    message = raw_request()
    assert not parsed(message).wants_empty_final_response
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.parameters["priority"].uint64_param = 2
    request = parsed(message)
    assert (request.wants_empty_final_response, request.priority) == (True, 2)


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(0, 2 * SMALL_BYTES))
def test_a_response_in_pieces_is_what_protobuf_would_write(raws: list[bytes], size: int) -> None:
    head = ModelInferResponse(model_name="m", id="1")
    raws = [*raws, bytes(size)]
    pieces = build_response(head, raws)
    assert ModelInferResponse.FromString(b"".join(pieces)) == ModelInferResponse(model_name="m", id="1", raw_output_contents=raws)
    if size > SMALL_BYTES:
        assert any(piece is raws[-1] for piece in pieces)


@pytest.mark.parametrize("size", [0, 10, 3 * SMALL_BYTES])
def test_a_renamed_request_differs_in_its_name_alone(size: int) -> None:
    message = raw_request()
    message.raw_input_contents[:] = [bytes(size)] * len(message.inputs)
    request = TensorRequest.parse(memoryview(message.SerializeToString()))
    renamed = request.renamed("other")
    message.model_name = "other"
    assert ModelInferRequest.FromString(bytes(renamed.raw)) == message
    assert (renamed.head.model_name, request.head.model_name != "other") == ("other", True)
    assert list(map(bytes, renamed.raw_inputs)) == list(message.raw_input_contents)
    assert renamed.renamed("other") is renamed


@pytest.mark.parametrize(
    "output",
    [
        ModelInferResponse.InferOutputTensor(contents=InferTensorContents(bytes_contents=[b""] * 70_000)),
        ModelInferResponse.InferOutputTensor(contents=InferTensorContents(int_contents=[1] * 70_000)),
        ModelInferResponse.InferOutputTensor(shape=[1] * 70_000),
    ],
)
def test_a_response_has_few_parts_besides_raw_tensors(output: ModelInferResponse.InferOutputTensor) -> None:
    """Workers send tensors in raw form alone; ten million elements of two bytes each held a frontend for 12 s."""
    with pytest.raises(EngineError, match=r"the model's response cannot be read: .* has more than 65536"):
        parse_response(ModelInferResponse(outputs=[output]).SerializeToString())


def test_a_response_may_have_long_parameters_and_any_raw_tensors() -> None:
    head = ModelInferResponse(outputs=[ModelInferResponse.InferOutputTensor(name="x")])
    head.parameters["k"].string_param = "v" * 1_000_000
    raw = b"\0\0\0\0" * 100_000
    parsed, [output] = parse_response(b"".join(build_response(head, [raw])))
    assert (parsed, bytes(output)) == (head, raw)
