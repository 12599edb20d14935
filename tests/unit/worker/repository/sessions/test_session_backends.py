"""What PyTorch, OpenVINO and TensorRT models have in common: refusals, and the calls of libraries that are not here."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from tests.support.repositories import X_TO_Y, infer, opened, x

PACKAGES = {"pytorch": "torch", "openvino": "openvino", "tensorrt": "tensorrt"}
FILES = {"pytorch": "model.pt", "openvino": "model.xml", "tensorrt": "model.plan"}
PLATFORMS = {"pytorch": "pytorch_libtorch", "openvino": "", "tensorrt": "tensorrt_plan"}


def model_of(repository: Path, backend: str, config: str = X_TO_Y, content: bytes = b"x") -> None:
    folder = repository / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / FILES[backend]).write_bytes(content)
    (folder / "config.pbtxt").write_text(f'backend: "{backend}"\n{config}')


async def refusal(repository: Path) -> str:
    async with opened(repository) as models:
        return str((await models.load_all(["m"]))["m"])


@pytest.mark.parametrize("backend", PACKAGES)
async def test_a_backend_whose_package_is_not_installed_says_what_to_install(tmp_path: Path, backend: str) -> None:
    if importlib.util.find_spec(PACKAGES[backend]) is not None:
        pytest.skip(f"{PACKAGES[backend]} is installed")
    model_of(tmp_path, backend)
    assert f"package{'s' if backend == 'tensorrt' else ''} {PACKAGES[backend]}" in await refusal(tmp_path)


@pytest.mark.parametrize("backend", PACKAGES)
async def test_a_model_without_its_file_is_refused(tmp_path: Path, backend: str) -> None:
    model_of(tmp_path, backend)
    (tmp_path / "m" / "1" / FILES[backend]).unlink()
    assert await refusal(tmp_path) == f"there is no file 1/{FILES[backend]}"


# TensorRT: the calls of its interface, and of CUDA's, as their documentation has them


ON_GPU = "instance_group { kind: KIND_GPU }\n"


class Mode(Enum):
    INPUT = 1
    OUTPUT = 2


class Context:
    """Doubles x to y."""

    def __init__(self, engine: Engine) -> None:
        self._shape: tuple[int, ...] = ()
        self._addresses: dict[str, int] = {}
        self._engine = engine

    def set_optimization_profile_async(self, profile: int, stream: object) -> bool:
        self._engine.profiles.append(profile)
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._shape = tuple(shape)
        return name == "x" and shape[-1] == 2

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: object) -> bool:
        count = int(np.prod(self._shape))
        given = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self._addresses["x"]))
        made = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self._addresses["y"]))
        made[:] = 2 * given
        return not self._engine.is_broken


class Engine:
    num_io_tensors = 2
    num_optimization_profiles = 2

    def __init__(self) -> None:
        self.is_broken = False
        self.profiles: list[int] = []

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name == "x" else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 2)

    def create_execution_context(self) -> Context:
        return Context(self)


class Cuda(ModuleType):
    """Memory of the device is memory of the host."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self) -> None:
        super().__init__("runtime")
        self.held: dict[int, Any] = {}

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,) if device == 0 else (101,)

    def cudaStreamCreate(self) -> tuple[int, str]:
        return 0, "stream"

    def cudaMallocAsync(self, size: int, stream: object) -> tuple[int, int]:
        block = ctypes.create_string_buffer(size)
        self.held[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFreeAsync(self, address: int, stream: object) -> tuple[int]:
        del self.held[address]
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: object) -> tuple[int]:
        ctypes.memmove(target, source, size)
        return (0,)

    def cudaStreamSynchronize(self, stream: object) -> tuple[int]:
        return (0,)


class Device:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = Engine()
        self.cuda = Cuda()
        tensorrt = ModuleType("tensorrt")
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda content: self.engine if content == b"plan" else None)
        members: Mapping[str, Any] = {
            "Logger": type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None}),
            "Runtime": lambda logger: runtime,
            "TensorIOMode": Mode,
            "nptype": lambda dtype: np.float32,
        }
        for name, member in members.items():
            setattr(tensorrt, name, member)
        bindings = ModuleType("cuda.bindings")
        bindings.runtime = self.cuda  # type: ignore[attr-defined]
        for name, module in {"tensorrt": tensorrt, "cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


async def test_a_tensorrt_engine_is_completed_run_in_batches_and_frees_its_memory(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    model_of(tmp_path, "tensorrt", 'instance_group { kind: KIND_GPU profile: "1" }', b"plan")
    async with opened(tmp_path, "m") as models:
        config = models.config("m", "")
        assert (config.platform, config.max_batch_size, config.HasField("dynamic_batching")) == ("tensorrt_plan", 4, True)
        assert [(tensor.name, tensor.data_type, tensor.dims) for tensor in config.input] == [("x", 11, [2])]
        inputs = {"x": np.array([[1, 2], [3, 4]], np.float32)}
        assert await infer(models, "m", inputs) == {"y": [[2, 4], [6, 8]]}
    assert "the tensorrt backend is experimental" in caplog.text
    assert device.engine.profiles == [1]
    assert device.cuda.held == {}


async def test_what_tensorrt_refuses_is_an_error_and_frees_its_memory(tmp_path: Path, device: Device) -> None:
    model_of(tmp_path, "tensorrt", ON_GPU + X_TO_Y.replace("-1", "-1, -1"), b"plan")
    async with opened(tmp_path, "m") as models:
        with pytest.raises(InvalidRequest, match=r"does not take input 'x' in shape \[1, 3\]"):
            await infer(models, "m", {"x": np.zeros((1, 3), np.float32)})
        device.engine.is_broken = True
        with pytest.raises(EngineError, match="TensorRT could not run it"):
            await infer(models, "m", {"x": np.zeros((1, 2), np.float32)})
    assert device.cuda.held == {}


@pytest.mark.parametrize(
    ("config", "content", "expected"),
    [
        (ON_GPU, b"other", "TensorRT cannot load 1/model.plan: it is for another TensorRT or another GPU"),
        ("instance_group { kind: KIND_CPU }", b"plan", "instance_group has no GPU, and the backend tensorrt needs one"),
        (
            "instance_group { kind: KIND_GPU gpus: 3 }",
            b"plan",
            "TensorRT cannot load 1/model.plan: cudaSetDevice failed with status 101",
        ),
        ('instance_group { kind: KIND_GPU profile: "2" }', b"plan", "instance_group.profile must be one number below 2, got 2"),
        (
            ON_GPU + 'input { name: "x" data_type: TYPE_FP32 dims: 2 is_non_linear_format_io: true }',
            b"plan",
            "tensor 'x' has is_non_linear_format_io, which is not supported",
        ),
        (ON_GPU + X_TO_Y.replace("FP32", "INT8"), b"plan", "input 'x' is declared as INT8; the model has FP32"),
    ],
)
async def test_an_engine_that_cannot_be_used_is_refused(
    tmp_path: Path, device: Device, config: str, content: bytes, expected: str
) -> None:
    model_of(tmp_path, "tensorrt", config, content)
    assert await refusal(tmp_path) == expected


# PyTorch: what is decided before and after its calls


class Tensor:
    """As much of a tensor as is needed."""

    dtype = "torch.float32"

    def __init__(self, array: Any) -> None:
        self.array = array

    def to(self, device: str, dtype: object) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.array


class Script:
    """Subtracts its second argument from its first, in the order of `forward(self, a, b)`."""

    def __init__(self, arguments: Sequence[str], kind: str) -> None:
        schema = [SimpleNamespace(name=name, type=kind) for name in ("self", *arguments)]
        self.forward = SimpleNamespace(schema=SimpleNamespace(arguments=schema))

    def eval(self) -> Script:
        return self

    def __call__(self, *arguments: Any) -> Any:
        if isinstance(arguments[0], dict):
            arguments = (arguments[0]["left"], arguments[0]["right"])
        difference = Tensor(arguments[0].array - arguments[1].array)
        return difference, Tensor(-difference.array)


def install_torch(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    torch: Any = ModuleType("torch")
    torch.jit = SimpleNamespace(load=lambda file, map_location: script, optimized_execution=lambda flag: nullcontext())
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    torch.inference_mode = torch.no_grad = nullcontext
    torch.from_numpy, torch.Tensor, torch.bfloat16 = Tensor, Tensor, "torch.bfloat16"
    monkeypatch.setitem(sys.modules, "torch", torch)


def tensors(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    written = [f'input {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in inputs]
    written += [f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in outputs]
    return "\n".join(written)


@pytest.mark.parametrize(
    ("arguments", "kind", "inputs", "outputs"),
    [
        (("a", "b"), "Tensor", ("b", "a"), ("OUTPUT__0", "OUTPUT__1")),
        (("a", "b"), "Tensor", ("INPUT__1", "INPUT__0"), ("OUTPUT__1", "OUTPUT__0")),
        (("a", "b"), "Tensor", ("left", "right"), ("difference", "negative")),
        (("both",), "Dict[str, Tensor]", ("right", "left"), ("difference", "negative")),
    ],
)
async def test_tensors_are_matched_to_arguments_by_name_by_index_or_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    kind: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    install_torch(monkeypatch, Script(arguments, kind))
    model_of(tmp_path, "pytorch", tensors(inputs, outputs))
    minuend = {"b": 3.0, "a": 10.0, "INPUT__1": 3.0, "INPUT__0": 10.0, "left": 10.0, "right": 3.0}
    async with opened(tmp_path, "m") as models:
        given = {name: np.array([minuend[name]], np.float32) for name in inputs}
        result = await infer(models, "m", given)
    difference, negative = ("OUTPUT__0", "OUTPUT__1") if "OUTPUT__0" in outputs else outputs
    assert result == {difference: [7.0], negative: [-7.0]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tensors("abc", "y"), "the configuration has 3 inputs; forward takes 2: a, b"),
        (tensors(("x__0", "z__0"), "y"), "the tensors 'x__0' and 'z__0' have the same position"),
        (
            tensors("ab", "y") + 'parameters { key: "INFERENCE_MODE" value { string_value: "yes" } }',
            "must be true or false, got 'yes'",
        ),
        (tensors("ab", "y") + 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "x" } }', "which is not a number"),
        (tensors("ab", "y") + "instance_group { kind: KIND_GPU }", "instance_group requires a GPU"),
        ("", "the configuration needs input and output"),
    ],
)
async def test_a_configuration_that_does_not_fit_a_torchscript_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, expected: str
) -> None:
    install_torch(monkeypatch, Script(("a", "b"), "Tensor"))
    model_of(tmp_path, "pytorch", config)
    assert expected in await refusal(tmp_path)


async def test_an_output_that_a_model_does_not_give_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(monkeypatch, Script(("a", "b"), "Tensor"))
    model_of(tmp_path, "pytorch", tensors("ab", ("OUTPUT__2",)))
    async with opened(tmp_path, "m") as models:
        with pytest.raises(EngineError, match="gave 2 outputs, and 'OUTPUT__2' is not among them"):
            await infer(models, "m", {"a": x(1)["x"], "b": x(1)["x"]})
