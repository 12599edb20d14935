"""The requests that `dynamo.local.ask` sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.tensors.tensors import to_numpy
from dynamo.local.ask import from_file, from_metadata, shown, text_request
from dynamo.protos import inference_pb2 as pb

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_prompt_is_requested_as_a_stream() -> None:
    request = text_request("m", "héllo", 7)
    assert [tensor.name for tensor in request.inputs] == ["text_input", "streaming"]
    assert to_numpy(request.raw_input_contents[0], "BYTES", [1]).tolist() == ["héllo".encode()]
    assert request.parameters["max_tokens"].int64_param == 7


def test_the_example_of_the_classifier_is_an_image() -> None:
    request = from_file("classifier", EXAMPLES / "classifier.json")
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("FP32", [1, 8, 8])
    assert to_numpy(request.raw_input_contents[0], "FP32", [1, 8, 8]).max() == 231
    assert request.outputs[1].parameters["classification"].int64_param == 3


def test_text_tensors_in_a_file_become_bytes(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"inputs": [{"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "bc"]}]}')
    assert from_file("m", file).raw_input_contents[0] == b"\1\0\0\0a\2\0\0\0bc"


def test_an_unknown_datatype_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"inputs": [{"name": "t", "datatype": "FP31", "shape": [1], "data": [1]}]}')
    with pytest.raises(InvalidRequest, match="FP31"):
        from_file("m", file)


def test_without_a_file_ones_of_the_declared_shapes_are_sent() -> None:
    metadata = pb.ModelMetadataResponse(name="m")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    metadata.inputs.add(name="t", datatype="BYTES", shape=[-1])
    request = from_metadata(metadata)
    assert to_numpy(request.raw_input_contents[0], "FP32", [1, 3]).tolist() == [[1.0, 1.0, 1.0]]
    assert to_numpy(request.raw_input_contents[1], "BYTES", [1]).tolist() == [b"hello"]


def test_long_tensors_are_shown_by_their_first_elements() -> None:
    assert shown(np.array([b"seven", b"two"], object)) == "seven, two"
    assert shown(np.array([0.123456, 2.0], np.float32)) == "0.1235, 2"
    assert shown(np.arange(20)).endswith("9, …")
