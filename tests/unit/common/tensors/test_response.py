from __future__ import annotations

import numpy as np
import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.response import ResponseForm
from dynamo.common.tensors.tensors import decode_bytes, from_numpy
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

CARD = ModelCard(
    name="m",
    kind=ModelKind.TENSOR,
    versions=("1", "2"),
    inputs=(TensorSpec(name="X", datatype="FP32", shape=(2,)),),
    outputs=(
        TensorSpec(name="Y", datatype="FP32", shape=(2,)),
        TensorSpec(name="H", datatype="FP16", shape=(-1,)),
        TensorSpec(name="S", datatype="BYTES", shape=(-1,)),
        TensorSpec(name="P", datatype="FP32", shape=(3,), labels=("cat", "dog")),
    ),
)
BITS = b"\x01\x00\xc1\x7f\x00\x00\x80\x3f"
"""A NaN with a payload, and 1."""


def form(*outputs: str, typed: bool = False, version: str = "", card: ModelCard = CARD, top: int = 0) -> ResponseForm:
    request = ModelInferRequest(model_name="alias", model_version=version, id="7")
    tensor = request.inputs.add(name="X", datatype="FP32", shape=[2])
    if typed:
        tensor.contents.fp32_contents.extend([1, 2])
    else:
        request.raw_input_contents.append(BITS)
    for name in outputs:
        output = request.outputs.add(name=name)
        if top:
            output.parameters["classification"].int64_param = top
    return ResponseForm.of(TensorRequest.parse(request.SerializeToString()), card)


def answered(*names: str) -> ModelInferResponse:
    head = ModelInferResponse()
    for name in names:
        head.outputs.add(name=name, datatype="FP32", shape=[2])
    return head


def encoded(form: ResponseForm, arrays: dict[str, np.ndarray]) -> ModelInferResponse:
    """The response to `form` of an engine that computed `arrays`."""
    head, raws = ModelInferResponse(), []
    for name, array in arrays.items():
        datatype, raw = from_numpy(array)
        head.outputs.add(name=name, datatype=datatype, shape=array.shape)
        raws.append(raw)
    return ModelInferResponse.FromString(b"".join(form.encode(head, raws)))


def test_a_response_carries_the_name_version_and_id_of_its_request() -> None:
    response = ModelInferResponse.FromString(b"".join(form().encode(answered("Y"), [BITS])))
    assert (response.model_name, response.model_version, response.id) == ("alias", "2", "7")
    assert list(response.raw_output_contents) == [BITS]
    assert ModelInferResponse.FromString(b"".join(form(version="1").encode(answered()))).model_version == "1"


def test_a_large_output_is_not_copied() -> None:
    head = ModelInferResponse()
    head.outputs.add(name="Y", datatype="FP32", shape=[100_000])
    data = memoryview(bytearray(400_000))
    assert any(piece is data for piece in form("Y").encode(head, [data]))


def test_typed_contents_of_an_engine_become_raw() -> None:
    head = answered("Y")
    head.outputs[0].contents.fp32_contents.extend([1, 2])
    response = ModelInferResponse.FromString(b"".join(form().encode(head)))
    assert list(response.raw_output_contents) == [np.array([1, 2], "<f4").tobytes()]
    assert not response.outputs[0].HasField("contents")


def test_a_response_has_only_the_requested_outputs_in_the_order_of_the_engine() -> None:
    arrays = {"Y": np.ones(2, np.float32), "H": np.ones(1, np.float16), "S": np.array([b"x"], object)}
    response = encoded(form("S", "Y"), arrays)
    assert [output.name for output in response.outputs] == ["Y", "S"]
    assert response.raw_output_contents[1] == b"\1\0\0\0x"


@pytest.mark.parametrize("form", [form(), form("Y"), form("Y", "P"), form("P"), form("P", top=2)])
def test_a_head_that_responses_share_is_encoded_like_others_and_stays_as_it_is(form: ResponseForm) -> None:
    head, raws = answered("Y", "P"), [BITS, BITS]
    shared = answered("Y", "P")
    response = form.encode(shared, raws, shared.SerializeToString())
    assert shared == head
    assert ModelInferResponse.FromString(b"".join(response)) == ModelInferResponse.FromString(b"".join(form.encode(head, raws)))


def test_a_requested_output_that_the_model_did_not_give_is_left_out() -> None:
    assert [output.name for output in encoded(form("S", "Y"), {"Y": np.ones(2, np.float32)}).outputs] == ["Y"]


def test_the_final_response_has_no_outputs_and_is_marked_as_final() -> None:
    response = ModelInferResponse.FromString(b"".join(form("Y").encode_final()))
    assert response.parameters["triton_final_response"].bool_param
    assert not response.outputs
    assert response.id == "7"


def test_the_best_classes_are_named() -> None:
    response = encoded(form("P", top=2), {"P": np.array([0.25, 0.5, 0.5], np.float32)})
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [2])
    assert decode_bytes(response.raw_output_contents[0], 2) == [b"0.500000:1:dog", b"0.500000:2"]


def test_strings_cannot_be_classified() -> None:
    with pytest.raises(InvalidRequest, match="class result not available for output due to unsupported type 'BYTES'"):
        encoded(form("S", top=2), {"S": np.array([b"a", b"b"], object)})


def test_each_row_of_a_batch_is_classified() -> None:
    card = ModelCard(
        name="m",
        kind=ModelKind.TENSOR,
        max_batch_size=8,
        outputs=(TensorSpec(name="P", datatype="INT64", shape=(-1, 3)),),
    )
    response = encoded(form("P", top=9, card=card), {"P": np.array([[1, 2, 3], [9, 8, 7]])})
    assert list(response.outputs[0].shape) == [2, 3]
    assert decode_bytes(response.raw_output_contents[0], 6) == [b"3:2", b"2:1", b"1:0", b"9:0", b"8:1", b"7:2"]


def test_more_classes_than_the_output_has_elements_are_all_of_them() -> None:
    response = encoded(form("P", top=2**62), {"P": np.array([0.25, 0.5, 0.5], np.float32)})
    assert list(response.outputs[0].shape) == [3]


def test_a_response_has_at_most_10000_classes() -> None:
    values = np.arange(20_000, dtype=np.float32)
    assert list(encoded(form("P", top=10_000), {"P": values}).outputs[0].shape) == [10_000]
    assert list(encoded(form("P", top=10_001), {"P": values[:10_000]}).outputs[0].shape) == [10_000]
    with pytest.raises(
        InvalidRequest, match=r"'classification' of output 'P' wants 10001 classes of 20000 for 1 rows; .* most 10000"
    ):
        encoded(form("P", top=10_001), {"P": values})
    with pytest.raises(InvalidRequest, match=r"'classification' of output 'P' .* in all outputs together"):
        encoded(form("P", "Y", top=6_000), {"Y": values, "P": values})


def test_the_classes_of_all_rows_count() -> None:
    card = ModelCard(
        name="m", kind=ModelKind.TENSOR, max_batch_size=200, outputs=(TensorSpec(name="P", datatype="INT64", shape=(-1, 100)),)
    )
    assert list(encoded(form("P", top=100, card=card), {"P": np.zeros((100, 100), int)}).outputs[0].shape) == [100, 100]
    with pytest.raises(InvalidRequest, match="wants 100 classes of 100 for 101 rows"):
        encoded(form("P", top=100, card=card), {"P": np.zeros((101, 100), int)})


def test_refused_classes_are_not_searched() -> None:
    head = ModelInferResponse()
    head.outputs.add(name="P", datatype="FP32", shape=[1_000_000])
    with pytest.raises(InvalidRequest):
        next(form("P", top=10_001).encode_in_steps(head, [bytes(4_000_000)]))


@pytest.mark.parametrize(
    ("head", "raws", "sentence"),
    [
        (answered("Y"), [BITS, BITS], "the model responded with 2 buffers for 1 outputs"),
        (answered("Y"), [BITS[:7]], "malformed output 'Y': it has 7 bytes where FP32"),
        (answered("Y"), [], "malformed output 'Y': a tensor has 0 elements"),
    ],
)
def test_what_an_engine_got_wrong_is_its_own_error(head: ModelInferResponse, raws: list[bytes], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        form("Y").encode(head, raws)
