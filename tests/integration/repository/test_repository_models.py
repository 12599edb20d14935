"""Loading and unloading, versions, ONNX models, ensembles, and where a model's files may come from."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import shutil
from pathlib import Path

import fsspec
import numpy as np
import onnx
import pytest
from google.protobuf import json_format
from onnx import TensorProto, helper

from dynamo.common.errors import Code, DynamoError, Forbidden, InvalidRequest, ModelNotFound, PayloadTooLarge, Unsupported
from dynamo.common.process.background import running
from dynamo.common.repository import ControlMode, IndexEntry, LoadRequest, ModelState
from dynamo.common.tensors.message_json import to_json
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.control import RepositoryControl
from dynamo.worker.repository.declared.layout import Fingerprint
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.repository.models.model_folders import ModelFolders
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.scheduling.rate_limiter import ProvidedResource, RateLimiter
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stores.source import ModelPaths
from dynamo.worker.serve import Service
from tests.support.repositories import DOUBLE, EXAMPLES, X_TO_Y, ensemble, infer, model_with_config, opened, python_model, step, x

SLOW = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        folder = os.path.dirname(pb_utils.get_model_dir())
        open(os.path.join(folder, "begun"), "w").close()
        until = time.monotonic() + 120
        while not os.path.exists(os.path.join(folder, "go")):
            assert time.monotonic() < until, "the test has not let it go"
            time.sleep(0.002)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def onnx_model(folder: Path, factor: float = 2.0, dims: tuple[int | str, ...] = ("n", 3), version: int = 1) -> Path:
    """`x` times `factor` is `y`; a folder without a configuration."""
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    shape = list(dims)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "times",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / str(version) / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def states(models: RepositoryModels) -> dict[tuple[str, str], str]:
    return {(entry.name, entry.version): entry.state.value for entry in models.index()}


ROW = {"x": np.array([[1, 2, 3]], np.float32)}


# ONNX


async def test_an_onnx_model_needs_no_configuration(tmp_path: Path) -> None:
    onnx_model(tmp_path / "times")
    onnx_model(tmp_path / "fixed", dims=(2, 3))
    async with opened(tmp_path, "times", "fixed") as models:
        card = models.find("times").card
        assert (card.max_batch_size, card.inputs[0].shape, card.outputs[0].shape) == (4, (-1, 3), (-1, 3))
        assert models.config("times", "").HasField("dynamic_batching")
        assert card.platform == "onnxruntime_onnx" and card.backend == "onnxruntime"
        assert await infer(models, "times", ROW) == {"y": [[2.0, 4.0, 6.0]]}
        fixed = models.find("fixed").card
        assert (fixed.max_batch_size, fixed.inputs[0].shape) == (0, (2, 3))


@pytest.mark.parametrize("policy", ["", "default_queue_policy { max_queue_size: 9 }"])
async def test_an_onnx_model_without_a_batch_dimension_may_have_a_queue(tmp_path: Path, policy: str) -> None:
    tensors = "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 3 ] }}\n' for kind, name in (("input", "x"), ("output", "y"))
    )
    folder = onnx_model(tmp_path / "times", dims=(3,))
    (folder / "config.pbtxt").write_text(f"{tensors} dynamic_batching {{ {policy} }}")
    async with opened(tmp_path, "times") as models:
        responses = await asyncio.gather(*(infer(models, "times", x(n, n, n)) for n in range(4)))
        assert responses == [{"y": [2.0 * n] * 3} for n in range(4)]


async def test_requests_for_an_onnx_model_are_batched_and_split_again(tmp_path: Path) -> None:
    config = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 5000000 }
instance_group { count: 2 kind: KIND_CPU }
"""
    folder = onnx_model(tmp_path / "times")
    (folder / "config.pbtxt").write_text(config)
    async with opened(tmp_path, "times") as models:
        rows = [{"x": np.full((2, 3), number, np.float32)} for number in range(4)]
        responses = await asyncio.gather(*(infer(models, "times", row) for row in rows))
        assert responses == [{"y": [[2.0 * number] * 3] * 2} for number in range(4)]
        with pytest.raises(InvalidRequest, match="inference request batch-size must be <= 8 for 'times'"):
            await infer(models, "times", {"x": np.zeros((9, 3), np.float32)})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('input { name: "z" data_type: TYPE_FP32 dims: [ 3 ] }', "has no input 'z'"),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_INT8 dims: [ 3 ] }', "declared as INT8; the model has FP32"),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }', "the model has [-1, 3]"),
        ('backend: "dali"', "backend 'dali' is not supported"),
        ('platform: "tensorflow_savedmodel"', "platform 'tensorflow_savedmodel' is not supported"),
        ('name: "other"', "that of a model named 'other'"),
        ("max_batch_size: 2 dynamic_batching { preferred_batch_size: [ 4 ] }", "preferred_batch_size must be from 1 to 2, got 4"),
        ("version_policy { specific { versions: [ 3 ] } }", "version 3"),
        ("this is no configuration", "config.pbtxt is not usable"),
        ("instance_group { kind: KIND_GPU count: 1 }", "requires a GPU"),
        ('parameters { key: "intra_op_thread_count" value { string_value: "many" } }', "'many', which is not a number"),
        ('default_model_filename: "other.onnx"', "no file 1/other.onnx"),
    ],
)
async def test_a_configuration_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, config: str, reason: str) -> None:
    folder = onnx_model(tmp_path / "times")
    (folder / "config.pbtxt").write_text(config)
    async with opened(tmp_path) as models:
        failed = await models.load_all(["times"])
        assert reason in str(failed["times"])
        assert reason in models.index()[0].reason


async def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    folder = onnx_model(tmp_path / "times")
    (folder / "1" / "model.onnx").write_bytes(b"nonsense")
    (tmp_path / "empty").mkdir()
    async with opened(tmp_path) as models:
        failed = await models.load_all(["times", "empty"])
    assert "ONNX Runtime cannot load 1/model.onnx" in str(failed["times"])
    assert "the model's backend is unknown" in str(failed["empty"])


async def test_onnx_models_take_and_return_strings(tmp_path: Path) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.STRING, [None]) for name in ("a", "b")]
    graph = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "same", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "same" / "1").mkdir(parents=True)
    onnx.save(model, str(tmp_path / "same" / "1" / "model.onnx"))
    async with opened(tmp_path, "same", default_max_batch_size=0) as models:
        assert await infer(models, "same", {"a": np.array([b"x", "ä".encode()], object)}) == {"b": ["x", "ä"]}
        with pytest.raises(InvalidRequest, match="UTF-8"):
            await infer(models, "same", {"a": np.array([b"\xff"], object)})


async def test_a_model_is_warm_before_it_is_ready(tmp_path: Path) -> None:
    code = DOUBLE.replace(
        "    def execute(self, requests):\n",
        """    def execute(self, requests):
        for r in requests:
            print(r.request_id(), r.inputs()[0].as_numpy().tolist(), file=open(pb_utils.get_model_dir() + "/seen", "a"))
            assert r.inputs()[0].as_numpy().sum() < 99
""",
    )
    config = (
        X_TO_Y
        + """
max_batch_size: 4
model_warmup {
  name: "zeros" batch_size: 2 count: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }
}
model_warmup { name: "file" inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "one" } } }
"""
    )
    folder = python_model(tmp_path, "warm", code, config)
    (folder / "warmup").mkdir()
    (folder / "warmup" / "one").write_bytes(np.array([5], "<f4").tobytes())
    async with opened(tmp_path, "warm") as models:
        seen = (folder / "1" / "seen").read_text().splitlines()
        assert seen == ["warmup zeros [[0.0, 0.0], [0.0, 0.0]]"] * 2 + ["warmup file [[5.0]]"]
        warmups = models.find("warm").warmups
        assert [(warmup.version, warmup.timings.rows) for warmup in warmups] == [("1", 2), ("1", 2), ("1", 1)]
        (folder / "warmup" / "one").write_bytes(np.array([100], "<f4").tobytes())
        with pytest.raises(InvalidRequest, match=r"the warm-up 'file' failed: .*AssertionError"):
            await models.load_model(LoadRequest(model="warm"))
        (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text().replace('"one"', '"../config.pbtxt"'))
        with pytest.raises(InvalidRequest, match="not a path inside"):
            await models.load_model(LoadRequest(model="warm"))


# Versions


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["2", "10"]),
        ("version_policy { all { } }", ["1", "2", "10"]),
        ("version_policy { specific { versions: [ 2, 1 ] } }", ["1", "2"]),
    ],
)
async def test_the_version_policy_chooses_the_versions(tmp_path: Path, policy: str, served: list[str]) -> None:
    for version in (1, 2, 10):
        folder = onnx_model(tmp_path / "times", factor=version, version=version)
    (folder / "config.pbtxt").write_text(policy)
    (folder / "007").mkdir()
    (folder / "notes").mkdir()
    async with opened(tmp_path, "times") as models:
        assert list(models.find("times").card.versions) == served
        assert states(models) == {("times", version): "READY" for version in served}
        for version in served:
            assert (await infer(models, "times", ROW, version=version))["y"][0][0] == float(version)
        assert (await infer(models, "times", ROW))["y"][0][0] == float(served[-1])
        with pytest.raises(ModelNotFound):
            await infer(models, "times", ROW, version="3")


async def test_a_version_that_is_left_out_by_a_later_load_is_unloaded_in_the_index(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = onnx_model(tmp_path / "times", factor=version, version=version)
    (folder / "config.pbtxt").write_text("version_policy { all { } }")
    async with opened(tmp_path, "times") as models:
        only_two = '{"backend": "onnxruntime", "version_policy": {"specific": {"versions": ["2"]}}}'
        await models.load_model(LoadRequest(model="times", config=only_two))
        assert states(models) == {("times", "1"): "UNAVAILABLE", ("times", "2"): "READY"}
        assert {entry.reason for entry in models.index()} == {"", "unloaded"}
        both = only_two.replace('["2"]', '["1", "2"]')
        await models.load_model(LoadRequest(model="times", config=both))
        assert states(models) == {("times", "1"): "READY", ("times", "2"): "READY"}
        await models.load_model(LoadRequest(model="times", config=only_two))
        await models.unload_model("times")
        assert states(models) == {("times", "2"): "UNAVAILABLE"}


# Ensembles


async def test_the_examples_are_loaded_in_the_order_in_which_they_need_each_other() -> None:
    seven = np.zeros((1, 8, 8), np.float32)
    seven[0, 0, 1:7] = 1
    for row, column in enumerate((5, 4, 4, 3, 3, 2, 2), start=1):
        seven[0, row, column : column + 2] = 1
    async with opened(EXAMPLES, "read_aloud") as models:
        assert set(states(models).values()) == {"READY"} and len(states(models)) == 3
        responses = await infer(models, "read_aloud", {"image": seven})
        assert responses["text_output"] == [[b"You said: seven"]]
        assert int(np.argmax(responses["probability"][0])) == 7


async def test_steps_run_as_their_tensors_come_whatever_their_order(tmp_path: Path) -> None:
    for name, factor in (("two", 2.0), ("three", 3.0)):
        onnx_model(tmp_path / name, factor, dims=("n",))
    ensemble(
        tmp_path,
        step("three", {"x": "b"}, {"y": "c"}),
        step("two", {"x": "c"}, {"y": "y"}),
        step("two", {"x": "x"}, {"y": "b"}),
    )
    async with opened(tmp_path, "both", default_max_batch_size=0) as models:
        assert await infer(models, "both", x(1, 10)) == {"y": [12.0, 120.0]}


@pytest.mark.parametrize(
    ("steps", "more", "reason"),
    [
        ([step("two", {"x": "x"}, {"y": "z"})], "", "no step gives the output 'y'"),
        ([step("two", {"x": "w"}, {"y": "y"})], "", "no step or input gives the tensor 'w'"),
        ([step("two", {"x": "y"}, {"y": "y"})], "", "no step takes the input 'x'"),
        ([step("two", {"q": "x"}, {"y": "y"})], "", "maps the input 'q'"),
        ([step("two", {"x": "x"}, {"q": "y"})], "", "maps the output 'q'"),
        ([step("two", {}, {"y": "y"})], "", "gives the model no input 'x'"),
        ([step("two", {"x": "x"}, {"y": "y"})] * 2, "", "comes from two places"),
        ([step("missing", {"x": "x"}, {"y": "y"})], "", "needs model 'missing'"),
        ([step("both", {"x": "x"}, {"y": "y"})], "", "need each other"),
        ([step("two", {"x": "x"}, {"y": "y"})], "max_batch_size: 4", "model 'two' takes 0"),
        ([], "", "has no steps"),
        (
            [step("two", {"x": "a"}, {"y": "b"}), step("two", {"x": "b"}, {"y": "a"}), step("two", {"x": "x"}, {"y": "y"})],
            "",
            "waits, by way of others, for itself",
        ),
    ],
)
async def test_an_ensemble_that_does_not_fit_together_is_refused(
    tmp_path: Path, steps: list[str], more: str, reason: str
) -> None:
    onnx_model(tmp_path / "two", dims=("n",))
    ensemble(tmp_path, *steps, more=more)
    async with opened(tmp_path, default_max_batch_size=0) as models:
        assert reason in str((await models.load_all(["both"]))["both"])


async def test_a_step_that_fails_fails_the_request(tmp_path: Path) -> None:
    python_model(tmp_path, "bad", DOUBLE.replace("2 *", "1 // 0 *"))
    onnx_model(tmp_path / "two", dims=("n",))
    ensemble(tmp_path, step("bad", {"x": "x"}, {"y": "b"}), step("two", {"x": "b"}, {"y": "y"}))
    async with opened(tmp_path, "both", default_max_batch_size=0) as models:
        async with asyncio.timeout(120):
            with pytest.raises(DynamoError, match="ZeroDivisionError"):
                await infer(models, "both", x(1))


async def test_the_outputs_of_an_ensemble_have_the_labels_of_the_models_that_give_them(tmp_path: Path) -> None:
    labelled = X_TO_Y.replace('name: "y"', 'name: "y" label_filename: "labels.txt"')
    for name in ("first", "second"):
        (python_model(tmp_path, name, config=labelled) / "labels.txt").write_text(f"{name} 0\n{name} 1\n")
    outputs = "".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] {more} }}\n' for name, more in OUTPUTS.items())
    steps = (step("first", {"x": "x"}, {"y": "a"}), step("second", {"x": "a"}, {"y": "b"}), step("first", {"x": "b"}, {"y": "c"}))
    config = f'input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}\n{outputs}ensemble_scheduling {{ {" ".join(steps)} }}'
    (model_with_config(tmp_path, "both", config) / "own.txt").write_text("own 0\n")
    async with opened(tmp_path, "both") as models:
        labels = {spec.name: spec.labels for spec in models.find("both").card.outputs}
    assert labels == {"a": ("first 0", "first 1"), "b": ("second 0", "second 1"), "c": ("own 0",)}


OUTPUTS = {"a": "", "b": "", "c": 'label_filename: "own.txt"'}


async def test_unloading_includes_dependent_ensembles_and_models_only_they_need(tmp_path: Path) -> None:
    for name in ("two", "three", "other"):
        onnx_model(tmp_path / name, dims=("n",))
    ensemble(tmp_path, step("two", {"x": "x"}, {"y": "b"}), step("three", {"x": "b"}, {"y": "y"}))
    async with opened(tmp_path, "both", "other", default_max_batch_size=0) as models:
        await models.unload_model("two")
        assert {name for (name, _), state in states(models).items() if state == "READY"} == {"three", "other"}
        assert {entry.name: entry.reason for entry in models.index()}["both"] == "unloaded"
        await models.load_model(LoadRequest(model="both"))
        await models.unload_model("both")
        assert states(models)["two", "1"] == states(models)["three", "1"] == "READY"
        await models.load_model(LoadRequest(model="both"))
        await models.unload_model("both", dependents=True)
        assert {name for (name, _), state in states(models).items() if state == "READY"} == {"other"}


async def test_models_that_were_loaded_for_their_own_sake_stay_when_their_ensemble_is_unloaded(tmp_path: Path) -> None:
    for name in ("two", "three"):
        onnx_model(tmp_path / name, dims=("n",))
    ensemble(tmp_path, step("two", {"x": "x"}, {"y": "b"}), step("three", {"x": "b"}, {"y": "y"}))
    async with opened(tmp_path, "two", "both", default_max_batch_size=0) as models:
        await models.unload_model("both", dependents=True)
        assert {name for (name, _), state in states(models).items() if state == "READY"} == {"two"}
        await models.load_model(LoadRequest(model="three"))
        await models.load_model(LoadRequest(model="both"))
        await models.unload_model("both", dependents=True)
        assert {name for (name, _), state in states(models).items() if state == "READY"} == {"two", "three"}


async def test_a_model_is_changed_only_for_callers_that_may_use_every_ensemble_with_it(tmp_path: Path) -> None:
    onnx_model(tmp_path / "two", dims=("n",))
    ensemble(tmp_path, step("two", {"x": "x"}, {"y": "y"}), name="inner")
    ensemble(tmp_path, step("inner", {"x": "x"}, {"y": "y"}), name="outer")
    async with opened(tmp_path, "outer", default_max_batch_size=0) as models:
        for permitted in (("two",), ("two", "inner"), ("two", "outer")):
            with pytest.raises(Forbidden, match="model 'two' is part of ensembles that the API key may not use"):
                await models.unload_model("two", permitted=permitted)
            with pytest.raises(Forbidden, match="may not use"):
                await models.load_model(LoadRequest(model="two", config='{"backend": "onnxruntime"}', permitted=permitted))
        assert await infer(models, "outer", x(3)) == {"y": [6.0]}
        await models.unload_model("two", permitted=("two", "*er"))
        with pytest.raises(Forbidden, match="may not use"):  # the ensembles would come back with it
            await models.load_model(LoadRequest(model="two", permitted=("two",)))
        await models.load_model(LoadRequest(model="two", permitted=("two", "*er")))
        assert await infer(models, "outer", x(3)) == {"y": [6.0]}


async def test_models_that_the_caller_may_not_use_stay_when_their_ensemble_is_unloaded(tmp_path: Path) -> None:
    for name in ("two", "three"):
        onnx_model(tmp_path / name, dims=("n",))
    ensemble(tmp_path, step("two", {"x": "x"}, {"y": "b"}), step("three", {"x": "b"}, {"y": "y"}))
    async with opened(tmp_path, "both", default_max_batch_size=0) as models:
        await models.unload_model("both", dependents=True, permitted=("both", "three"))
        assert {name for (name, _), state in states(models).items() if state == "READY"} == {"two"}


async def test_loading_a_model_again_brings_back_the_ensemble_that_was_unloaded_with_it(tmp_path: Path) -> None:
    for name in ("two", "three"):
        onnx_model(tmp_path / name, dims=("n",))
    ensemble(tmp_path, step("two", {"x": "x"}, {"y": "b"}), step("three", {"x": "b"}, {"y": "y"}))
    async with opened(tmp_path, "both", default_max_batch_size=0) as models:
        await models.unload_model("two")
        await models.unload_model("three")
        await models.load_model(LoadRequest(model="two"))
        assert "both" not in {name for (name, _), state in states(models).items() if state == "READY"}
        await models.load_model(LoadRequest(model="three"))
        assert await infer(models, "both", x(3)) == {"y": [12.0]}
        await models.unload_model("two")
        await models.unload_model("both")
        await models.load_model(LoadRequest(model="two"))
        assert "both" not in {name for (name, _), state in states(models).items() if state == "READY"}, (
            "it was unloaded on request"
        )


async def test_a_configuration_of_a_request_stays_until_the_files_change_or_the_model_is_unloaded(tmp_path: Path) -> None:
    folder = onnx_model(tmp_path / "times", dims=("n",))
    async with opened(tmp_path, "times", default_max_batch_size=0) as models:

        async def key_after(request: LoadRequest) -> str:
            await models.load_model(request)
            return models.config("times", "").parameters["key"].string_value

        override = LoadRequest(model="times", config='{"backend": "onnxruntime", "parameters": {"key": {"string_value": "v"}}}')
        assert [await key_after(request) for request in (override, LoadRequest(model="times"))] == ["v", "v"]
        onnx_model(folder, 5.0, dims=("n",))
        assert await key_after(LoadRequest(model="times")) == ""
        assert await key_after(override) == "v"
        await models.unload_model("times")
        assert await key_after(LoadRequest(model="times")) == ""


async def test_clients_and_models_see_what_a_configuration_leaves_out(tmp_path: Path) -> None:
    code = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
    def execute(self, requests):
        text = pb_utils.np.array([[self.args["model_config"], self.args["model_instance_name"]]] * len(requests), object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", row[None])]) for row in text]
"""
    config = X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING') + "max_batch_size: 6 dynamic_batching { }"
    python_model(tmp_path, "plain", code, config)
    async with opened(tmp_path, "plain") as models:
        [[text, instance]] = (await infer(models, "plain", {"x": np.ones((1, 1), np.float32)}))["y"]
        config_seen = models.config("plain", "")
    assert instance == b"plain_0" and json.loads(text) == to_json(config_seen)
    plain = json.loads(text)
    assert plain["version_policy"] == {"latest": {"num_versions": 1}} and plain["default_model_filename"] == "model.py"
    [group] = plain["instance_group"]
    assert (group["name"], group["kind"], group["count"]) == ("plain", "KIND_CPU", 1)
    assert plain["dynamic_batching"]["preferred_batch_size"] == [6]
    assert plain["optimization"]["input_pinned_memory"] == plain["optimization"]["output_pinned_memory"] == {"enable": True}


# Loading and unloading


async def test_unloading_lets_accepted_requests_finish(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "slow", SLOW)
    async with opened(tmp_path, "slow") as models, asyncio.timeout(120):
        open_request = asyncio.create_task(infer(models, "slow", x(5)))
        while not (folder / "begun").exists():
            await asyncio.sleep(0.005)
        unloading = asyncio.create_task(models.unload_model("slow"))
        while states(models) != {("slow", "1"): "UNLOADING"}:
            await asyncio.sleep(0)
        (folder / "go").touch()
        assert await open_request == {"y": [5.0]}
        await unloading
        with pytest.raises(ModelNotFound):
            await infer(models, "slow", x(5))
        [entry] = models.index()
        assert (entry.state, entry.reason) == (ModelState.UNAVAILABLE, "unloaded")


async def test_loading_again_changes_over_without_a_gap_and_a_failure_changes_nothing(tmp_path: Path) -> None:
    folder = onnx_model(tmp_path / "times", dims=("n",))
    async with opened(tmp_path, "times", default_max_batch_size=0) as models:
        onnx_model(folder, 5.0, dims=("n",))
        assert await infer(models, "times", x(1)) == {"y": [2.0]}
        await models.load_model(LoadRequest(model="times"))
        assert await infer(models, "times", x(1)) == {"y": [5.0]}
        (folder / "1" / "model.onnx").write_bytes(b"nonsense")
        with pytest.raises(InvalidRequest, match="ONNX Runtime"):
            await models.load_model(LoadRequest(model="times"))
        assert await infer(models, "times", x(1)) == {"y": [5.0]}
        assert states(models) == {("times", "1"): "READY"}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ("dims: [ 1 ]", "model input 'x' must specify 'data_type' for wrong"),
        ("data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 3, 3 ]", "model input 'x' NHWC/NCHW require 3 dims for wrong, got 2"),
        ("data_type: TYPE_FP32", "model input 'x' must specify 'dims' for wrong"),
        ("data_type: TYPE_FP32 dims: [ 0 ]", "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"),
        ("data_type: TYPE_FP32 dims: [ -2 ]", "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"),
        ("data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 3 ] }", "has different size for dims and reshape for wrong"),
        ("data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 3 ] }", "has different size for dims and reshape for wrong"),
        ("data_type: TYPE_FP32 dims: [ 2, -1, 6 ] reshape { shape: [ 3, -1, 4 ] }", "has different size for dims and reshape"),
        (
            "data_type: TYPE_FP32 dims: [ -1, 1 ] reshape { shape: [ -1, -1 ] }",
            "has different number of variable-size dimensions",
        ),
        ("data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ 0 ] }", "reshape dimensions must be integer >= 1"),
    ],
)
async def test_tensors_that_stay_incomplete_are_refused_in_triton_s_words(tmp_path: Path, tensor: str, reason: str) -> None:
    config = f'input {{ name: "x" {tensor} }} output {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }}'
    python_model(tmp_path, "wrong", config=config)
    python_model(tmp_path, "right")
    async with opened(tmp_path) as models:
        failed = await models.load_all(["wrong", "right"])
        assert reason in str(failed.pop("wrong")) and not failed
        assert await infer(models, "right", x(2)) == {"y": [4.0]}


async def test_missing_models_are_not_found_and_unloaded_already(tmp_path: Path) -> None:
    async with opened(tmp_path) as models:
        with pytest.raises(ModelNotFound):
            await models.load_model(LoadRequest(model="missing"))
        await models.unload_model("missing")
        assert models.index() == ()
        assert models.index() == ()
        onnx_model(tmp_path / "late")
        await models.load_model(LoadRequest(model="late"))
        assert states(models) == {("late", "1"): "READY"}


async def test_a_name_that_two_repositories_have_is_refused(tmp_path: Path) -> None:
    onnx_model(tmp_path / "a" / "times")
    onnx_model(tmp_path / "b" / "times")
    async with opened(tmp_path / "a", also=(tmp_path / "b",)) as models:
        with pytest.raises(InvalidRequest, match="several repositories"):
            await models.load_model(LoadRequest(model="times"))


class FlakyFolders(ModelFolders):
    """Folders on a network file system where each operation fails the first time."""

    failing: set[str]

    def fail_once(self, operation: str) -> None:
        if operation in self.failing:
            self.failing.discard(operation)
            raise OSError(errno.ESTALE, "Stale file handle")

    def list_names(self) -> list[str]:
        self.fail_once("list")
        return super().list_names()

    def fingerprints(self) -> dict[str, Fingerprint]:
        self.fail_once("fingerprints")
        return super().fingerprints()


class FlakyModels(RepositoryModels):
    """A repository on a network file system where each operation fails the first time."""

    def __init__(self, settings: RepositorySettings) -> None:
        super().__init__(settings)
        copies = ContentCache(settings.copies, settings.copies_bytes)
        self.flaky = FlakyFolders(settings.folders, (), copies, ModelPaths((), settings.path_max_bytes))
        self.flaky.failing = {"list", "fingerprints", "load"}
        self.folders = self.flaky

    async def load_model(self, request: LoadRequest) -> tuple[str, ...]:
        self.flaky.fail_once("load")
        return await super().load_model(request)


async def test_polling_continues_after_errors_of_the_file_system(tmp_path: Path) -> None:
    settings = RepositorySettings(folders=(tmp_path,), copies=tmp_path)
    engine = RepositoryEngine(settings, ControlMode.POLL)
    engine.models = models = FlakyModels(settings)
    python_model(tmp_path, "double")
    published = asyncio.Event()

    async def register() -> None:
        published.set()

    service = Service([])
    control = RepositoryControl(engine, service, register)
    try:
        async with asyncio.timeout(120), running(control.watch(0.01), "repository"):
            while not service.models:
                await published.wait()
                published.clear()
        assert models.flaky.failing == set()
    finally:
        await models.close()


# Parameters of a load


async def test_a_request_may_bring_its_own_configuration(tmp_path: Path) -> None:
    onnx_model(tmp_path / "times")
    async with opened(tmp_path, "times") as models:
        config = ModelConfig(backend="onnxruntime", max_batch_size=7)
        await models.load_model(LoadRequest(model="times", config=json_format.MessageToJson(config)))
        assert models.find("times").card.max_batch_size == 7
        with pytest.raises(InvalidRequest, match="the configuration is not usable"):
            await models.load_model(LoadRequest(model="times", config='{"max_batch_size": "many"}'))
        assert models.find("times").card.max_batch_size == 7
        await models.unload_model("times")
        await models.load_model(LoadRequest(model="times"))
        assert models.find("times").card.max_batch_size == 4


async def test_a_request_may_bring_the_whole_model(tmp_path: Path) -> None:
    elsewhere = onnx_model(tmp_path / "elsewhere", 9.0, dims=("n",))
    (tmp_path / "repository").mkdir()
    files = {"1/model.onnx": (elsewhere / "1" / "model.onnx").read_bytes()}
    async with opened(tmp_path / "repository", default_max_batch_size=0) as models:
        await models.load_model(LoadRequest(model="sent", config=json.dumps({"backend": "onnxruntime"}), files=files))
        assert await infer(models, "sent", x(1)) == {"y": [9.0]}
        await models.unload_model("sent")
        unloaded = (IndexEntry(name="sent", version="1", state=ModelState.UNAVAILABLE, reason="unloaded"),)
        assert models.index() == unloaded
        with pytest.raises(InvalidRequest, match="config"):
            await models.load_model(LoadRequest(model="sent", files=files))
        with pytest.raises(ModelNotFound):
            await models.load_model(LoadRequest(model="sent"))
        assert [entry.name for entry in models.index()] == ["sent"]


@pytest.mark.parametrize("name", ["1/" + "n" * 256, "1"])
async def test_files_whose_names_no_file_system_takes_are_refused(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path) as models:
        files = {"1/model.py": DOUBLE.encode(), name: b"text"}
        with pytest.raises(DynamoError, match=r"^failed to load 'new', failed to poll from model repository: ") as error:
            await models.load_model(LoadRequest(model="new", config='{"backend": "python"}', files=files))
        assert error.value.code is Code.INTERNAL
        assert models.index() == ()


async def test_files_that_cannot_be_written_leave_the_state_of_a_model_as_it_is(tmp_path: Path) -> None:
    python_model(tmp_path, "m")
    async with opened(tmp_path, "m") as models:
        await models.unload_model("m")
        with pytest.raises(DynamoError, match="failed to poll"):
            await models.load_model(LoadRequest(model="m", config="{}", files={"n" * 256: b""}))
        [entry] = models.index()
        assert (entry.reason, entry.is_wanted) == ("unloaded", False)


async def test_wrong_configurations_name_their_fields_and_leave_the_rest_of_the_repository_serving(tmp_path: Path) -> None:
    wrong = {
        'sequence_batching { control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID } } }': "needs a data_type",
        "response_cache { enable: true } sequence_batching { }": "response_cache.enable must be false",
        'instance_group { rate_limiter { resources { name: "R" count: 2 } } }': "instance_group.rate_limiter: ",
        "max_batch_size: -1": "max_batch_size",
    }
    for number, config in enumerate(wrong):
        python_model(tmp_path, f"wrong{number}", config=X_TO_Y + config)
    python_model(tmp_path, "good")
    limiter = RateLimiter((ProvidedResource("R", 1),))
    async with opened(tmp_path, rate_limiter=limiter) as models:
        failed = await models.load_all(["good", *(f"wrong{number}" for number in range(len(wrong)))])
        for number, reason in enumerate(wrong.values()):
            assert reason in str(failed.pop(f"wrong{number}"))
            with pytest.raises(InvalidRequest, match=re.escape(reason)):
                await models.load_model(LoadRequest(model=f"wrong{number}"))
        assert not failed
        assert await infer(models, "good", x(1)) == {"y": [2.0]}


async def test_a_python_model_may_declare_no_tensors(tmp_path: Path) -> None:
    async with opened(tmp_path) as models:
        await models.load_model(LoadRequest(model="new", config='{"backend": "python"}', files={"1/model.py": DOUBLE.encode()}))
        [card] = models.cards()
        assert (card.inputs, card.outputs) == ((), ())


@pytest.mark.parametrize(
    "path", ["../up", "/etc/passwd", "1/../../up", "1//x", "./x", "", "a\\b", "x\0y", "1/..", "x" * 2000, "a/\n"]
)
async def test_files_that_lead_out_of_the_model_are_refused(tmp_path: Path, path: str) -> None:
    async with opened(tmp_path) as models:
        request = LoadRequest(model="m", config='{"backend": "python"}', files={path: b"x", "1/model.py": DOUBLE.encode()})
        with pytest.raises(InvalidRequest, match="not a path inside"):
            await models.load_model(request)
    assert not (tmp_path.parent / "up").exists()


OUTSIDE = ["../../secret", "/etc/hostname", "x/../../../secret"]


def loads_with(folder: Path, config: ModelConfig) -> tuple[LoadRequest, ...]:
    """A model under another configuration: from its folder, and all of it from the request."""
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    text = json_format.MessageToJson(config)
    return LoadRequest(model=folder.name, config=text), LoadRequest(model=folder.name, config=text, files=files)


@pytest.mark.parametrize("path", OUTSIDE)
async def test_labels_are_read_from_the_model_s_folder_only(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("s3cret")
    folder = onnx_model(tmp_path / "repository" / "m")
    config = ModelConfig(backend="onnxruntime")
    config.output.add(name="y", data_type="TYPE_FP32", dims=[-1, 3])
    async with opened(tmp_path / "repository") as models:
        config.output[0].label_filename = path
        for request in loads_with(folder, config):
            with pytest.raises(InvalidRequest, match="not a path inside the model's folder"):
                await models.load_model(request)
        (folder / "labels.txt").write_text("cat\ndog")
        config.output[0].label_filename = "labels.txt"
        for request in loads_with(folder, config):
            await models.load_model(request)
            assert models.find("m").card.outputs[0].labels == ("cat", "dog")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
async def test_the_model_s_file_is_one_of_its_own(tmp_path: Path, backend: str, path: str) -> None:
    (tmp_path / "secret").write_text("raise SystemExit('it was run')")
    folder = onnx_model(tmp_path / "repository" / "m")
    async with opened(tmp_path / "repository") as models:
        for request in loads_with(folder, ModelConfig(backend=backend, default_model_filename=path)):
            with pytest.raises(InvalidRequest, match="not a path inside the model's folder"):
                await models.load_model(request)


@pytest.mark.parametrize("path", [*OUTSIDE, "libm.so.6/"])
async def test_libraries_of_operators_are_loaded_from_the_model_s_folder_only(tmp_path: Path, path: str) -> None:
    folder = onnx_model(tmp_path / "repository" / "m")
    config = ModelConfig(backend="onnxruntime")
    config.model_operations.op_library_filename.append(path)
    async with opened(tmp_path / "repository") as models:
        for request in loads_with(folder, config):
            with pytest.raises(InvalidRequest, match="not a path inside the model's folder"):
                await models.load_model(request)
        config.model_operations.op_library_filename[:] = ["ops.so"]
        (folder / "ops.so").write_text("no library")
        with pytest.raises(InvalidRequest, match=f"{folder}/ops.so"):  # it was looked for there
            await models.load_model(LoadRequest(model="m", config=json_format.MessageToJson(config)))


async def test_model_path_names_folders_below_the_roots_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    onnx_model(root / "good", 4.0, dims=("n",))
    onnx_model(tmp_path / "secret")
    (root / "link").symlink_to(tmp_path / "secret")
    repository = tmp_path / "repository"
    repository.mkdir()
    async with opened(repository, path_roots=(str(root),), default_max_batch_size=0) as models:
        for path in (f"{root}/good", f"file://{root}/good"):
            await models.load_model(LoadRequest(model="mine", path=path))
            assert await infer(models, "mine", x(1)) == {"y": [4.0]}
        for path in (f"{root}/../secret", f"{root}/link", str(root), "/", f"file://{root}/link", "s3://bucket/x", "relative"):
            with pytest.raises(Forbidden):
                await models.load_model(LoadRequest(model="mine", path=path))
        with pytest.raises(InvalidRequest, match="is not a folder"):
            await models.load_model(LoadRequest(model="mine", path=f"{root}/missing"))
        assert await infer(models, "mine", x(1)) == {"y": [4.0]}
    async with opened(repository) as models:
        with pytest.raises(Unsupported, match="no --model-path-root"):
            await models.load_model(LoadRequest(model="mine", path=f"{root}/good"))


async def test_model_path_copies_from_an_object_store(tmp_path: Path) -> None:
    folder = onnx_model(tmp_path / "made", 6.0, dims=("n",))
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/models/six", recursive=True)
    store.pipe("/bucket/secret/1/model.onnx", b"x")
    (tmp_path / "repository").mkdir()
    try:
        settings = {"path_roots": ("memory://bucket/models",), "default_max_batch_size": 0}
        async with opened(tmp_path / "repository", **settings) as models:
            await models.load_model(LoadRequest(model="six", path="memory://bucket/models/six"))
            shutil.rmtree(folder)
            assert await infer(models, "six", x(1)) == {"y": [6.0]}
            with pytest.raises(InvalidRequest, match="nothing at"):
                await models.load_model(LoadRequest(model="six", path="memory://bucket/models/missing"))
            for path in ("memory://bucket/secret", "memory://bucket/models", "memory://bucket/models2/x"):
                with pytest.raises(Forbidden):
                    await models.load_model(LoadRequest(model="six", path=path))
            for name in ("../secret", "*", "/secret", "a\nINFO dynamo.audit: forged"):
                with pytest.raises(InvalidRequest, match="parts that are not allowed"):
                    await models.load_model(LoadRequest(model="six", path=f"memory://bucket/models/{name}"))
        async with opened(tmp_path / "repository", path_max_bytes=10, **settings) as models:
            with pytest.raises(PayloadTooLarge, match="allows 10"):
                await models.load_model(LoadRequest(model="six", path="memory://bucket/models/six"))
    finally:
        store.rm("/bucket", recursive=True)
