"""Models of PyTorch, run by PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamo.common.errors import EngineError
from tests.support.repositories import ensemble, infer, opened, step


def folder_of(repository: Path, config: str) -> Path:
    (repository / "m" / "1").mkdir(parents=True)
    if config:
        (repository / "m" / "config.pbtxt").write_text(f'platform: "pytorch_libtorch"\n{config}')
    return repository / "m" / "1"


def tensor(kind: str, name: str, datatype: str, dims: str = "-1") -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }}\n'


class SumAndDifference(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Halves(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dtype == torch.bfloat16
        values += 1  # the model's own copy
        return values


class Texts(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, texts: list[str]) -> list[str]:
        return [text + "!" for text in texts]


class Named(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, both: dict[str, torch.Tensor]) -> torch.Tensor:
        return both["left"] * both["right"]


def save(folder: Path, module: Any) -> None:
    torch.jit.script(module).save(str(folder / "model.pt"))


async def test_a_torchscript_model_runs_in_batches(tmp_path: Path) -> None:
    config = tensor("input", "b", "FP32") + tensor("input", "a", "FP32", "2")
    config += tensor("output", "OUTPUT__1", "FP32", "2") + tensor("output", "OUTPUT__0", "FP32", "2")
    threads = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }'
    save(folder_of(tmp_path, f"{config}max_batch_size: 8 dynamic_batching {{ }} {threads}"), SumAndDifference())
    async with opened(tmp_path, "m") as models:
        a, b = np.array([[5, 6], [7, 8]], np.float32), np.array([[1, 2], [3, 4]], np.float32)
        expected = {"OUTPUT__0": [[6, 8], [10, 12]], "OUTPUT__1": [[4, 4], [4, 4]]}
        assert await infer(models, "m", {"a": a, "b": b}) == expected
        assert torch.get_num_threads() == 1
        with pytest.raises(EngineError, match=r"^model 'm' failed: "):
            await infer(models, "m", {"a": a, "b": np.zeros((2, 3), np.float32)})


async def test_bf16_text_and_dictionaries_reach_a_model_as_such(tmp_path: Path) -> None:
    half = tensor("input", "values", "BF16") + tensor("output", "out", "BF16")
    save(folder_of(tmp_path / "half", half), Halves())
    text = tensor("input", "texts", "STRING") + tensor("output", "out", "STRING")
    save(folder_of(tmp_path / "text", text), Texts())
    named = tensor("input", "left", "INT64") + tensor("input", "right", "INT64") + tensor("output", "out", "INT64")
    save(folder_of(tmp_path / "named", named), Named())
    given = np.array([1, -2.5], np.float32)
    given.flags.writeable = False
    async with opened(tmp_path / "half", "m") as models:
        assert await infer(models, "m", {"values": given}) == {"out": [2.0, -1.5]}
        assert given.tolist() == [1, -2.5]
    async with opened(tmp_path / "text", "m") as models:
        assert await infer(models, "m", {"texts": np.array([b"a", "\u00e9".encode()], object)}) == {
            "out": [b"a!", "\u00e9!".encode()]
        }
    async with opened(tmp_path / "named", "m") as models:
        assert await infer(models, "m", {"left": np.array([3]), "right": np.array([4])}) == {"out": [12]}


class Twice(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        negative = -x
        return negative, negative


class InPlace(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_()


class First(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def forward(self, x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return x.clone()


async def test_a_step_of_an_ensemble_that_works_in_place_changes_nothing_that_another_one_reads(tmp_path: Path) -> None:
    modules = {"twice": (Twice(), "x", "y z"), "in-place": (InPlace(), "x", "y"), "first": (First(), "x after", "y")}
    for name, (module, inputs, outputs) in modules.items():
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        tensors = [tensor("input", each, "FP32") for each in inputs.split()]
        tensors += [tensor("output", each, "FP32") for each in outputs.split()]
        (tmp_path / name / "config.pbtxt").write_text(f'platform: "pytorch_libtorch"\n{"".join(tensors)}')
        save(folder, module)
    ensemble(
        tmp_path,
        step("twice", {"x": "x"}, {"y": "a", "z": "b"}),
        step("in-place", {"x": "a"}, {"y": "c"}),
        step("first", {"x": "b", "after": "c"}, {"y": "y"}),
    )
    async with opened(tmp_path, "both") as models:
        assert await infer(models, "both", {"x": np.array([1, -2], np.float32)}) == {"y": [-1, 2]}


async def test_an_exported_program_needs_no_configuration(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    example = (torch.zeros(2, 3), torch.zeros(2, 3))
    program = torch.export.export(SumAndDifference(), example, dynamic_shapes={"a": {0: batch}, "b": {0: batch}})
    torch.export.save(program, str(folder_of(tmp_path, "") / "model.pt2"))
    async with opened(tmp_path, "m") as models:
        config = models.config("m", "")
        assert (config.backend, config.platform, config.max_batch_size) == ("pytorch", "pytorch_libtorch", 4)
        assert [(each.name, each.dims) for each in config.input] == [("a", [3]), ("b", [3])]
        assert [(each.name, each.dims) for each in config.output] == [("OUTPUT__0", [3]), ("OUTPUT__1", [3])]
        a, b = np.array([[5, 6, 7]], np.float32), np.array([[1, 2, 3]], np.float32)
        assert await infer(models, "m", {"a": a, "b": b}) == {"OUTPUT__0": [[6, 8, 10]], "OUTPUT__1": [[4, 4, 4]]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tensor("input", "INPUT__0", "INT32", "2, 3"), "input 'INPUT__0' is declared as INT32; the model has FP32"),
        (tensor("input", "a", "FP32", "2, 4"), r"input 'a' is declared in shape [2, 4]; the model has [2, 3]"),
    ],
)
async def test_a_configuration_that_contradicts_an_exported_program_is_refused(
    tmp_path: Path, config: str, expected: str
) -> None:
    program = torch.export.export(SumAndDifference(), (torch.zeros(2, 3), torch.zeros(2, 3)))
    torch.export.save(program, str(folder_of(tmp_path, config) / "model.pt2"))
    async with opened(tmp_path) as models:
        assert expected in str((await models.load_all(["m"]))["m"])


async def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (folder_of(tmp_path, tensor("input", "a", "FP32")) / "model.pt").write_bytes(b"x")
    async with opened(tmp_path) as models:
        assert "PyTorch cannot load 1/model.pt" in str((await models.load_all(["m"]))["m"])
