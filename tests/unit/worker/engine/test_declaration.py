from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelKind, TensorSpec
from dynamo.protos.model_config_pb2 import TYPE_FP32, ModelConfig
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.declaration import Declaration, Tensor, from_model_config, from_yaml, read_declaration
from dynamo.worker.engine.request_queue import QueuePolicies, QueuePolicy

PBTXT = """
name: "net"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }, { name: "hint" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_BF16 dims: [ 4 ] label_filename: "labels.txt" } ]
version_policy { specific { versions: [ 3, 1 ] } }
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 300
  default_queue_policy { max_queue_size: 7 }
}
parameters { key: "k" value { string_value: "v" } }
"""


def test_a_config_pbtxt_becomes_a_card_with_the_batch_dimension_in_front(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(PBTXT)
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\n")
    declaration = read_declaration(tmp_path / "config.pbtxt")
    card = declaration.to_card("net")
    assert card.kind is ModelKind.TENSOR
    assert card.inputs == (
        TensorSpec(name="x", datatype="FP32", shape=(-1, 3, -1)),
        TensorSpec(name="hint", datatype="BYTES", shape=(-1, 1), optional=True),
    )
    assert card.outputs == (TensorSpec(name="y", datatype="BF16", shape=(-1, 4), labels=("a", "b", "c", "d")),)
    assert (card.versions, card.max_batch_size, card.platform) == (("1", "3"), 8, "onnxruntime_onnx")
    assert ModelConfig.FromString(card.model_config).parameters["k"].string_value == "v"
    queue = QueuePolicies(default=QueuePolicy(max_size=7))
    assert declaration.batching == Batching(preferred_batch_size=(4, 8), max_queue_delay_us=300, queue=queue)
    assert declaration.concurrency == 2


def test_the_config_of_a_renamed_model_has_the_new_name(tmp_path: Path) -> None:
    card = from_model_config(ModelConfig(name="a", output=[{"name": "y", "data_type": TYPE_FP32, "dims": [1]}])).to_card("b")
    assert ModelConfig.FromString(card.model_config).name == "b"


def test_yaml_and_python_give_the_same_declaration() -> None:
    yaml = """
    name: net
    inputs: {x: {datatype: FP32, shape: [-1, 2]}}
    outputs: [{name: y, datatype: INT64, shape: [-1], labels: [a, b]}]
    max_batch_size: 4
    versions: [1, 2]
    batching: {preferred_batch_size: [2], max_queue_delay_us: 100}
    """
    python = Declaration(
        inputs={"x": Tensor("FP32", [-1, 2])},
        outputs={"y": Tensor("INT64", [-1], labels=["a", "b"])},
        max_batch_size=4,
        versions=["1", "2"],
        batching=Batching(preferred_batch_size=[2], max_queue_delay_us=100),
    )
    assert from_yaml(yaml).to_card("net") == python.to_card("net")
    assert from_yaml(yaml).batching == Batching(preferred_batch_size=(2,), max_queue_delay_us=100)


def y(**changes: object) -> Declaration:
    fields: dict[str, object] = {"inputs": {"x": Tensor("FP32", [1])}, "outputs": {"y": Tensor("FP32", [1])}, **changes}
    return Declaration(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        (y(outputs={}), "no outputs"),
        (y(inputs={"x": Tensor("FLOAT", [1])}), "FLOAT"),
        (y(inputs={"x": Tensor("FP32", [-2])}), "'x'"),
        (y(max_batch_size=4), "must begin with -1"),
        (y(max_batch_size=-1), "max_batch_size -1"),
        (y(batching=Batching()), "no max_batch_size"),
        (y(versions=()), "no version"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused_in_words(declaration: Declaration, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        declaration.to_card("net")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "inputs: {x: {datatype: FP32}}"),
        ("a.yaml", "inputs: ["),
        ("a.yaml", "outputs: {}\ninputs: {}\nmax_bach_size: 3"),
        ("a.pbtxt", "name: 3"),
        ("a.pbtxt", 'input [ { name: "x" dims: [1] } ]'),
        ("a.pbtxt", 'input [ { name: "x" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } } ]'),
        ("a.pbtxt", "sequence_batching { }"),
        ("a.pbtxt", 'metric_tags { key: "cost center" }'),
        ("a.json", "{}"),
    ],
)
def test_a_file_that_is_no_declaration_is_named_in_the_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=name):
        read_declaration(tmp_path / name)


def test_a_declaration_that_does_not_exist_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nothing\.yaml"):
        read_declaration(tmp_path / "nothing.yaml")
