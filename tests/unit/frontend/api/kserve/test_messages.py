from __future__ import annotations

import pytest

from dynamo.common.errors import EngineError
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import finish
from dynamo.frontend.api.kserve.messages import model_config, model_metadata, repository_index, server_metadata
from dynamo.protos import model_config_pb2
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInput

LLM = ModelCard(name="chatty", kind=ModelKind.LLM, llm=LlmInfo(context_length=8, tokenizer="k"))
TENSOR = ModelCard(
    name="t",
    kind=ModelKind.TENSOR,
    versions=("1", "2"),
    backend="python",
    inputs=(
        TensorSpec(name="A", datatype="FP32", shape=(-1, 3)),
        TensorSpec(name="B", datatype="BYTES", shape=(-1, 1), optional=True),
    ),
    outputs=(TensorSpec(name="Y", datatype="BF16", shape=(-1, 2)),),
    max_batch_size=8,
    decoupled=True,
    labels={"team": "vision"},
)


def test_the_server_metadata_has_name_version_and_extensions() -> None:
    metadata = server_metadata("triton")
    assert metadata.name == "triton"
    assert metadata.version
    assert {"binary_tensor_data", "model_configuration", "statistics"} <= set(metadata.extensions)


def test_a_language_model_has_text_in_and_text_out() -> None:
    metadata = model_metadata(LLM)
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("chatty", ["1"], "dynamo")
    assert [(t.name, t.datatype, list(t.shape)) for t in (*metadata.inputs, *metadata.outputs)] == [
        ("text_input", "BYTES", [1]),
        ("streaming", "BOOL", [1]),
        ("text_output", "BYTES", [-1]),
        ("finish_reason", "BYTES", [-1]),
    ]
    config = model_config(LLM).config
    assert (config.platform, config.backend) == ("dynamo", "dynamo")
    assert [(t.data_type, list(t.dims), t.optional) for t in config.input] == [
        (model_config_pb2.TYPE_STRING, [1], False),
        (model_config_pb2.TYPE_BOOL, [1], True),
    ]


def test_metadata_has_the_batch_dimension_and_the_configuration_has_not() -> None:
    metadata = model_metadata(TENSOR)
    assert list(metadata.versions) == ["1", "2"]
    assert [list(t.shape) for t in metadata.inputs] == [[-1, 3], [-1, 1]]
    assert metadata.properties == {"team": "vision"}
    config = model_config(TENSOR).config
    assert (config.name, config.backend, config.max_batch_size) == ("t", "python", 8)
    assert [(t.name, list(t.dims), t.optional) for t in config.input] == [("A", [3], False), ("B", [1], True)]
    assert config.output[0].data_type == model_config_pb2.TYPE_BF16
    assert config.model_transaction_policy.decoupled


def test_a_registered_configuration_supersedes_the_card() -> None:
    own = ModelConfig(name="own", backend="onnxruntime", max_batch_size=4)
    own.input.add(name="X", data_type=model_config_pb2.TYPE_STRING, dims=[5])
    own.parameters["k"].string_value = "v"
    card = ModelCard(name="own", kind=ModelKind.TENSOR, model_config=own.SerializeToString())
    assert model_config(card).config == own
    metadata = model_metadata(card)
    assert metadata.platform == "onnxruntime"
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("X", "BYTES", [-1, 5])]


def test_a_configuration_with_more_parts_than_any_model_has_is_the_workers_fault() -> None:
    """An input without any property has two bytes, and takes 26 µs as JSON."""
    own = ModelConfig(name="own", input=[ModelInput()] * 32_768)
    card = ModelCard(name="own", kind=ModelKind.TENSOR, model_config=own.SerializeToString())
    for describe in (model_config, model_metadata):
        with pytest.raises(EngineError, match="'own' registered a model configuration that cannot be read"):
            describe(card)


def test_a_broken_configuration_is_the_workers_fault() -> None:
    with pytest.raises(EngineError, match="model 'x' registered a model configuration that cannot be read"):
        model_config(ModelCard(name="x", kind=ModelKind.TENSOR, model_config=b"\xff"))


def test_the_repository_index_has_one_entry_per_model_and_version() -> None:
    index = finish(repository_index([TENSOR, LLM], lambda model, version: (model, version) != ("t", "1")))
    assert [(m.name, m.version, m.state, bool(m.reason)) for m in index] == [
        ("t", "1", "UNAVAILABLE", True),
        ("t", "2", "READY", False),
        ("chatty", "1", "READY", False),
    ]
