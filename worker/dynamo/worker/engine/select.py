"""Which engine a `--model` means, and that engine.

| `--model` | engine |
|---|---|
| `echo` | echo: input `INPUT0`, FP32 of any length |
| `echo:NAME=DATATYPE[dims],…` | echo with these inputs |
| `echo:file.yaml`, `echo:config.pbtxt` | echo with the inputs that the file declares |
| `echo:llm` | echo as a language model |
| `module:Class`, `path/to/file.py:Class` | python |
| a `.gguf` file, `smollm2` | llama |
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from dynamo.common.errors import InvalidRequest
from dynamo.worker.config import EngineKind
from dynamo.worker.engine.base import Engine, TensorEngine
from dynamo.worker.engine.declaration import PBTXT_SUFFIX, YAML_SUFFIXES, Declaration, read_declaration
from dynamo.worker.engine.echo import EchoTensors, EchoTokens, echo_declaration, parse_tensors
from dynamo.worker.engine.python import PythonEngine

AnyEngine: TypeAlias = Engine | TensorEngine

BUILT_IN_MODELS = ("smollm2",)
"""Names of small models that come as Python packages."""


def choose_engine(model: str) -> EngineKind:
    """The engine that `model` is for. Raises InvalidRequest saying what it could be."""
    where, colon, name = model.rpartition(":")
    if model == "echo" or model.startswith("echo:"):
        return EngineKind.ECHO
    if model.lower() in BUILT_IN_MODELS or model.endswith(".gguf"):
        return EngineKind.LLAMA
    if colon and where and name.isidentifier():
        return EngineKind.PYTHON
    if model and Path(model).is_dir():
        raise InvalidRequest(f"no engine of this version serves the folder {model}; it serves .gguf files and Python classes")
    raise InvalidRequest(
        f"model {model!r} is nothing that can be served: give a .gguf file, {', '.join(BUILT_IN_MODELS)}, "
        "module:Class, path/to/file.py:Class or echo"
    )


def make_engine(
    model: str,
    kind: EngineKind | None = None,
    *,
    name: str = "",
    threads: int | None = None,
    max_num_seqs: int | None = None,
    context_length: int | None = None,
) -> AnyEngine:
    """An engine for `model`, not started. `kind` overrides the choice, `name` the model's own name.

    Raises InvalidRequest if there is no such model, or the engine's package is not installed.
    """
    match kind or choose_engine(model):
        case EngineKind.ECHO:
            return _make_echo(model.removeprefix("echo").removeprefix(":"), name)
        case EngineKind.PYTHON:
            return PythonEngine.load(model, name=name)
        case EngineKind.LLAMA:
            return _make_llama(model, name, threads, max_num_seqs, context_length)


def _make_echo(what: str, name: str) -> AnyEngine:
    if what == "llm":
        return EchoTokens(name or "echo-llm")
    declaration: Declaration | None = None
    if Path(what).suffix in (*YAML_SUFFIXES, PBTXT_SUFFIX):
        declaration = read_declaration(Path(what))
    elif what:
        declaration = echo_declaration(parse_tensors(what))
    return EchoTensors(declaration, name=name)


def _make_llama(model: str, name: str, threads: int | None, max_num_seqs: int | None, context_length: int | None) -> AnyEngine:
    try:
        from dynamo.worker.engine.llama import LlamaEngine
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{model} needs the llama engine, but the package {error.name} is missing: install dynamo-serving[llama]"
        ) from error
    return LlamaEngine(model, name=name, threads=threads, slots=max_num_seqs, context_length=context_length)
