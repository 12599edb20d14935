"""A user's class: found by its name, what it declares about itself, and its hooks."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.declaration import (
    PBTXT_SUFFIX,
    YAML_SUFFIXES,
    Declaration,
    from_model_config,
    read_declaration,
)

T = TypeVar("T")

_ATTRIBUTES = ("name", "max_batch_size", "decoupled", "versions", "batching", "concurrency")


def load_class(target: str) -> tuple[type[Any], Path | None]:
    """Return the class that `module:Class` or `path/to/file.py:Class` names, and its file.

    Raises InvalidRequest if there is none; errors of the module itself pass through.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise InvalidRequest(f"{target!r} is not of the form module:Class or path/to/file.py:Class")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    model_class = getattr(module, name, None)
    if not isinstance(model_class, type):
        raise InvalidRequest(f"{where} has no class '{name}'")
    return model_class, Path(module.__file__) if module.__file__ else None


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise InvalidRequest(f"there is no file {path}")
    _importable(path.parent)
    name = f"dynamo_model_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded  # several models of one file share its module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidRequest(f"there is no module '{name}'") from error
        raise


def _importable(folder: Path) -> None:
    """Make the modules in a folder importable, as Python does for those beside a script."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def declaration_of(model: Any, file: Path | None) -> Declaration:
    """Return what a user's model declares, in any form. Raises InvalidRequest if it declares nothing or is malformed."""
    given = model.declare() if hasattr(model, "declare") else getattr(model, "config", None)
    folder = file.parent if file else Path.cwd()
    if isinstance(given, Declaration):
        return given
    if isinstance(given, ModelConfig):
        return from_model_config(given, folder)
    if isinstance(given, str | Path):
        return read_declaration(folder / given)
    kind = type(model).__name__
    if given is not None:
        raise InvalidRequest(f"{kind} is declared by a {type(given).__name__}; use a Declaration, a ModelConfig or a file name")
    if hasattr(model, "inputs") or hasattr(model, "outputs"):
        set_here = {name: getattr(model, name) for name in _ATTRIBUTES if hasattr(model, name)}
        return Declaration(inputs=getattr(model, "inputs", {}), outputs=getattr(model, "outputs", {}), **set_here)
    beside = [file.with_suffix(suffix) for suffix in (*YAML_SUFFIXES, PBTXT_SUFFIX)] if file else []
    for path in beside:
        if path.is_file():
            return read_declaration(path)
    raise InvalidRequest(f"{kind} declares no inputs and outputs, and no file beside it does")


async def call_hook(model: Any, name: str) -> None:
    """Call a user's `load` or `close`, if there is one: in a thread unless it is async."""
    hook = getattr(model, name, None)
    if hook is None:
        return
    if inspect.iscoroutinefunction(hook):
        await hook()
    else:
        await asyncio.to_thread(guarded, hook)


def guarded(work: Callable[[], T]) -> T:
    """Call `work` in a thread. Raises EngineError for an error that could not leave the thread, such as SystemExit."""
    try:
        return work()
    except Exception as error:
        if isinstance(error, StopIteration):
            raise EngineError("a model raised StopIteration") from error
        raise
    except BaseException as error:
        raise EngineError(f"a model raised {type(error).__name__}: {error}") from error


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
