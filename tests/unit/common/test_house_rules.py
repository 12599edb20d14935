"""Rules of the source tree that no other tool checks: names, docstrings, errors, options, and what import contracts cover."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parents[3]
ROOTS = ("protos", "common", "frontend", "worker", "planner", "local")

UNNAMED = re.compile(r"(?i)(?<![a-z])(?:some|no|any|every)body|(?<![a-z])(?:whoever|anyone|everyone|someone|no one)(?![a-z])")
"""Words that hide who acts: a client, a frontend, a worker, an operator."""


CONFLICT = re.compile(r"^(<<<<<<<|>>>>>>>)( |$)", re.M)
"""Begins lines that a merge left behind."""


def test_who_acts_is_named() -> None:
    assert [place for place in places_of(UNNAMED) if not place.startswith("CHANGELOG.md")] == []


def test_no_file_has_two_sides_of_a_conflict() -> None:
    assert places_of(CONFLICT) == [] and CONFLICT.search("one\n<<<<<<< HEAD\n")


def places_of(pattern: re.Pattern[str]) -> list[str]:
    """Return the lines of this repository's texts in which a pattern begins, each after where it is."""
    found: list[str] = []
    for file in own_files(".py", ".md", ".toml", ".yaml"):
        text = file.read_text()
        for match in pattern.finditer(text) if file != Path(__file__) else ():
            number = text.count("\n", 0, match.start()) + 1
            found.append(f"{file.relative_to(ROOT)}:{number}: {text.splitlines()[number - 1].strip()}")
    return found


@cache
def own_files(*suffixes: str) -> Sequence[Path]:
    """Return the files of this repository with these suffixes, without those of environments, builds and runs."""
    files: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".", "node_modules", "build", "dist"))]
        files += [Path(folder, name) for name in names if name.endswith(suffixes)]
    assert len(files) > 500
    return files


PRESCRIBED = {
    "Context": "what handlers of NVIDIA Dynamo get is called so (`compat.engines`), as is what engines get (`engine.base`)",
    "Endpoint": "handlers of NVIDIA Dynamo are served at an object of this name (`compat.runtime`)",
    "Tensor": "models of Triton import it from `pb_utils` (`stub.pb_tensors`), declarations of tensor models from `engine`",
}
"""Names that two classes of one process have, each with the interface that prescribes it."""


def test_a_class_name_is_unique_in_its_process(production: dict[str, ast.Module]) -> None:
    ambiguous: set[str] = set()
    for process in ("frontend/", "worker/"):
        ambiguous |= ambiguous_classes(
            {file: tree for file, tree in production.items() if file.startswith((process, "common/"))}
        ).keys()
    assert ambiguous == PRESCRIBED.keys()


def modules_of(*roots: str) -> dict[str, ast.Module]:
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text())
        for root in roots
        for file in sorted((ROOT / root / "dynamo" / root).rglob("*.py"))
    }


def ambiguous_classes(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the files of each class whose name another class has too, also as a private one: a search finds both."""
    files: dict[str, list[str]] = {}
    for file, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.lstrip("_"), []).append(file)
    return {name: found for name, found in files.items() if len(found) > 1}


def test_classes_of_one_name_are_found() -> None:
    sources = {"a": "class Session: ...\nclass Lease: ...", "b": "def open():\n    class _Session: ...", "c": "Lease = Other"}
    assert ambiguous_classes({file: ast.parse(source) for file, source in sources.items()}) == {"Session": ["a", "b"]}


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
    page = (ROOT / "docs" / "architecture" / "modules.md").read_text()
    module_map = page[: page.index("## Hot path rules")]
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


def without_subject(source: str) -> list[int]:
    """Return the lines of docstrings, of attributes and constants too, whose beginning leaves out what they are about."""
    if not re.search(r"[\"'](?:Of|Those|That)\b", source):
        return []
    texts = [(node.lineno, node.value) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    return [
        line
        for line, text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and re.match(r"(?:Of|Those|That)\b", text.value)
    ]


def test_every_docstring_says_its_subject() -> None:
    files = own_files(".py")
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in without_subject(file.read_text())]
    assert sorted(found) == []


def test_docstrings_without_a_subject_are_found() -> None:
    source = """
LIMIT = 3
"Of one key."
class Calls:
    '''Those of one process.'''
    size: int
    '''That of the largest call.'''
    text = "Of a string that is used."
    rank: int
    '''Offset of the first call, of those that wait.'''
"""
    assert without_subject(source) == [3, 5, 7]


SUPPRESSED = {"common/dynamo/common/messaging/nats/connection.py": 2}
"""How often a file may suppress whatever is raised: by a connection that is not used any more."""


def swallowed(tree: ast.AST) -> Iterator[str]:
    """Yield each place that lets any error end without a word: it raises nothing, calls nothing and does not use the error."""
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=caught, name=name, body=body) if catches_all(caught):
                inner = [each for statement in body for each in ast.walk(statement)]
                says = any(
                    isinstance(each, ast.Raise | ast.Call) or (isinstance(each, ast.Name) and each.id == name) for each in inner
                )
                if not says:
                    yield f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"
            case ast.Call(func=ast.Attribute(attr="suppress") | ast.Name(id="suppress"), args=args) if any(
                map(catches_all, args)
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def catches_all(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds)


@pytest.fixture(scope="module")
def production() -> dict[str, ast.Module]:
    """All modules of production, read once, and let go after this module."""
    return modules_of("common", "frontend", "worker", "planner", "local")


def test_no_error_is_swallowed(production: dict[str, ast.Module]) -> None:
    found = {file: list(swallowed(tree)) for file, tree in production.items()}
    assert {file: lines for file, lines in found.items() if len(lines) > SUPPRESSED.get(file, 0)} == {}


def test_errors_that_are_swallowed_are_found() -> None:
    source = """
try: a()
except Exception: pass
try: a()
except (OSError, BaseException): x = None
try: a()
except: return
with contextlib.suppress(Exception): a()
try: a()
except Exception as error: failure = error
try: a()
except Exception: log.exception("x")
try: a()
except BaseException: raise
try: a()
except OSError: pass
with suppress(OSError): a()
"""
    assert [found.partition(":")[0] for found in swallowed(ast.parse(source))] == [f"line {number}" for number in (3, 5, 7, 8)]


def unread_options(modules: Mapping[str, ast.Module]) -> list[str]:
    """Return the fields of configurations that no module reads, by their name: those whose flag has no effect."""
    nodes = [(file, node) for file, tree in modules.items() for node in ast.walk(tree)]
    read = {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return [
        f"{file}: {name}"
        for file, node in nodes
        if isinstance(node, ast.AnnAssign)
        if isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in ("option", "group")
        if isinstance(node.target, ast.Name) and (name := node.target.id) not in read
    ]


def test_every_option_is_read(production: dict[str, ast.Module]) -> None:
    assert unread_options(production) == []
    assert sum(len(re.findall(r" = option\(", (ROOT / file).read_text())) for file in production) > 200


def test_options_that_nothing_reads_are_found() -> None:
    source = (
        "class C:\n    a: int = option(1)\n    b: int = option(2)\n    c: D = group(D)\n    d: int = 3\nprint(config.b)\nx.a = 1"
    )
    assert unread_options({"x": ast.parse(source)}) == ["x: a", "x: c"]


def unresolved(modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield what docstrings name like `fleet.directory.Directory` where no module whose path ends so defines or imports it."""
    known: dict[str, list[str]] = {}
    for file, tree in modules.items():
        path = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in tree.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            names += [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known.setdefault(name, []).append(f".{path}")
    for file, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for path, name in re.findall(r"`((?:[a-z_]+\.)+)([A-Z]\w*[a-z]\w*)`", node.value):
                    is_ours = path.partition(".")[0] not in OTHERS
                    if is_ours and not any(module.endswith(f".{path}"[:-1]) for module in known.get(name, ())):
                        yield f"{file}: `{path}{name}`"


OTHERS = {"asyncio", "grpc", "inference", "llguidance", "msgspec"}
"""Libraries, and KServe's protocol, whose classes docstrings name."""


def test_a_class_that_a_docstring_names_with_its_module_is_there(production: dict[str, ast.Module]) -> None:
    assert list(unresolved(production)) == []


def test_names_of_classes_that_are_elsewhere_are_found() -> None:
    sources = {
        "frontend/dynamo/frontend/fleet/kv/feed.py": "class KvFeed: ...",
        "frontend/dynamo/frontend/a.py": "'`fleet.kv.feed.KvFeed` `kv.feed.KvFeed` `fleet.feed.KvFeed` `msgspec.Raw` `feed.No`'",
    }
    found = [use.partition(": ")[2] for use in unresolved({file: ast.parse(source) for file, source in sources.items()})]
    assert found == ["`fleet.feed.KvFeed`", "`feed.No`"]
