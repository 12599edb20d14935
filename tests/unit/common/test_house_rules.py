"""Rules of the source tree that no other tool checks: what tests may touch, and what the import contracts cover."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOTS = ("protos", "common", "frontend", "worker", "local")
TESTS = sorted((ROOT / "tests").rglob("*.py"))

ALLOWED = {
    "tests/simulation/clock.py": 1,  # asyncio's: its loop runs handles so
    "tests/simulation/history.py": 1,  # asyncio's: tasks of a process that is killed end without a warning
}
"""How often a file may use a private name of another module, for which there is no other way."""

CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "delitem"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__") and name not in NAMED_TUPLE


def private_uses(source: str) -> Iterator[str]:
    """Yield each use of a private name that the file itself does not define: attributes, imports, and names in `setattr`."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node)}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own and not is_own(node):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom():
                yield from (f"line {node.lineno}: import {alias.name}" for alias in node.names if is_private(alias.name))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[_, ast.Constant(value=str(name)), *_]):
                if called in BY_NAME and is_private(name) and name not in own:
                    yield f"line {node.lineno}: {ast.unparse(node)}"


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_test_uses_a_private_name_of_another_module() -> None:
    uses = {str(file.relative_to(ROOT)): list(private_uses(file.read_text())) for file in TESTS}
    assert {name: listed for name, listed in uses.items() if len(listed) > ALLOWED.get(name, 0)} == {}


def test_files_that_may_use_private_names_exist() -> None:
    assert [name for name in ALLOWED if not (ROOT / name).exists()] == []


def test_private_uses_are_found() -> None:
    source = """
from x import _secret
class Own:
    def __init__(self): self._mine = 1
a._other; a.b._c; own._mine; self._x; a._replace(b=1); a.__class__
monkeypatch.setattr(a, "_d", 1)
"""
    uses = {use.partition(": ")[2] for use in private_uses(source)}
    assert uses == {"import _secret", "monkeypatch.setattr(a, '_d', 1)", "a._other", "a.b._c"}


def upper_bounds_of_time(source: str) -> Iterator[str]:
    """Yield each assertion that so much time has passed at most, by a clock that is read in it."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Assert):
            for node in ast.walk(statement.test):
                if isinstance(node, ast.Compare):
                    values = [node.left, *node.comparators]
                    for smaller, operator in zip(values, node.ops, strict=False):
                        if isinstance(operator, ast.Lt | ast.LtE) and is_difference_of_clocks(smaller):
                            yield f"line {statement.lineno}: {ast.unparse(statement)}"


def is_difference_of_clocks(node: ast.expr) -> bool:
    match node:
        case ast.BinOp(left=ast.Call(func=ast.Attribute(attr=name)), op=ast.Sub()):
            return name in CLOCKS
    return False


def test_no_test_asserts_that_something_took_at_most_so_long() -> None:
    bounds = {str(file.relative_to(ROOT)): list(upper_bounds_of_time(file.read_text())) for file in TESTS}
    assert {name: listed for name, listed in bounds.items() if listed} == {}


def test_upper_bounds_of_time_are_found() -> None:
    source = """
assert time.monotonic() - begun < 1
assert 0.04 < loop.time() - start <= 1, "soon"
assert loop.time() - start > 0.04 and clock.now - start < 1
"""
    assert [bound.partition(":")[0] for bound in upper_bounds_of_time(source)] == ["line 2", "line 3"]


def test_no_source_root_has_an_init_file_that_would_hide_the_others() -> None:
    assert [str(file) for root in ROOTS if (file := ROOT / root / "dynamo" / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", ["frontend", "frontend/api", "worker"])
def test_every_module_has_a_layer_in_the_import_contracts(package: str) -> None:
    root, _, inner = package.partition("/")
    folder = ROOT / root / "dynamo" / root / inner
    children = {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"} - {"__init__"}
    assert children == set(layers_of(".".join(["dynamo", root, *filter(None, [inner])])))


@pytest.mark.parametrize("package", ["frontend", "worker"])
def test_the_module_map_names_every_layer(package: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    module_map = page[page.index("## Layers and modules") : page.index("## etcd keys and NATS subjects")]
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`\n]+)`", module_map))))
    assert set(layers_of(f"dynamo.{package}")) - {"__main__", "paths"} - named == set()


def layers_of(container: str) -> list[str]:
    """Return the modules in the layers of the contract for `container`, which has to name them all."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [contract for contract in settings["contracts"] if container in contract.get("containers", ())]
    assert contract["exhaustive"]
    return [module for layer in contract["layers"] for module in re.findall(r"\w+", layer)]


@pytest.mark.parametrize("library", ["nats-py", "prometheus-client"])
def test_a_library_whose_private_parts_are_used_is_pinned_exactly(library: str) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = [dependency for dependency in dependencies if re.match(rf"{library}(\[.*\])?[=<>~!]", dependency)]
    assert len(pins) == 1 and re.search(r"==\d+\.\d+\.\d+$", pins[0]), pins
