from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import InvalidRequest
from dynamo.common.names import Endpoint
from dynamo.worker.config import EngineKind, WorkerConfig
from dynamo.worker.engine.echo import EchoTensors, EchoTokens
from dynamo.worker.engine.python import PythonEngine
from dynamo.worker.engine.select import choose_engine, make_engine


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("echo", EngineKind.ECHO),
        ("echo:llm", EngineKind.ECHO),
        ("echo:A=FP32[1]", EngineKind.ECHO),
        ("examples/classifier.py:Classifier", EngineKind.PYTHON),
        ("package.module:Class", EngineKind.PYTHON),
        ("/models/x.Q4.gguf", EngineKind.LLAMA),
        ("smollm2", EngineKind.LLAMA),
    ],
)
def test_the_model_decides_the_engine(model: str, kind: EngineKind) -> None:
    assert choose_engine(model) is kind


@pytest.mark.parametrize("model", ["gpt-5", "a:b-c", ":Class", ""])
def test_a_model_that_nothing_serves_is_refused_with_what_could_be(model: str) -> None:
    with pytest.raises(InvalidRequest, match="module:Class"):
        choose_engine(model)


def test_a_folder_that_no_engine_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="folder"):
        choose_engine(str(tmp_path))


async def test_engines_are_made_with_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "name: e\ninputs: {A: {datatype: INT8, shape: [2]}}\noutputs: {A: {datatype: INT8, shape: [2]}}\n"
    )
    tensors = make_engine(f"echo:{tmp_path}/e.yaml", name="other")
    assert isinstance(tensors, EchoTensors)
    [card] = await tensors.start()
    assert (card.name, card.inputs[0].name) == ("other", "A")
    tokens = make_engine("echo:llm")
    assert isinstance(tokens, EchoTokens)
    assert (await tokens.start()).name == "echo-llm"
    assert isinstance(make_engine("examples/classifier.py:Classifier"), PythonEngine)


def config(*argv: str, **environ: str) -> WorkerConfig:
    return load(WorkerConfig, argv, environ, program="dynamo-worker")


def test_models_are_given_one_by_one_and_may_hold_commas() -> None:
    loaded = config("--model", "echo:A=FP32[1],B=FP32[1]", "--model=echo:llm", "--model-name", "a", "--model-name", "b")
    assert (loaded.models, loaded.model_names) == (("echo:A=FP32[1],B=FP32[1]", "echo:llm"), ("a", "b"))


def test_the_endpoint_is_given_whole_or_in_parts() -> None:
    assert config().served_endpoint == Endpoint("dynamo", "backend", "generate")
    assert config("--endpoint", "dyn://n.c.e", "--component", "d").served_endpoint == Endpoint("n", "d", "e")
    assert config(DYN_NAMESPACE="prod").served_endpoint == Endpoint("prod", "backend", "generate")


@pytest.mark.parametrize(
    "argv",
    [
        ("--endpoint", "a.b"),
        ("--namespace", "a*b"),
        ("--model", "echo", "--model-name", "a", "--model-name", "b"),
        ("--engine", "magic"),
        ("--drain-timeout", "-1"),
    ],
)
def test_settings_that_cannot_be_used_stop_the_start(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        config(*argv)
