"""Rules of folders: how large one may be, that its `__init__` is a map of it, and that tests lie where their modules do."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.of import find_tests, modules, origin, subject, users

ROOT = Path(__file__).parents[3]
ROOTS = ("common", "frontend", "worker", "planner", "local")
UNIT = ROOT / "tests" / "unit"

MAX_FILES = 20
MAX_FOLDER_LINES = 4000
MAX_FILE_LINES = 550
LARGE = {
    "frontend/dynamo/frontend/config.py": 1360,  # a list of options
}
"""Files that may be longer, and how long."""

OTHERS = {"benchmarks", "deploy", "docs", "protos"}
"""Folders of unit tests of something else than a source root."""
ABOUT_OTHERS = {
    "frontend/names/test_names.py",  # of the package, not of `serving.names`
    "frontend/test_usage.py",  # of the ledger, the fleet's and the operation together
}
"""Tests that have the name of a module and are about more than it."""
ABOUT_NO_MODULE = {
    "common/test_held.py": "`tests/support/held.py`",
    "common/test_house_rules.py": "the source tree",
    "common/test_private_names_and_limits.py": "the source tree",
    "common/test_requirements.py": "`constraints.txt`",
    "common/test_rooms.py": "the source tree",
    "common/test_rules_of_tests.py": "tests",
}
"""Tests beside those of modules, and what they are about."""


def packages() -> list[Path]:
    return sorted(file.parent for root in ROOTS for file in (ROOT / root / "dynamo").rglob("__init__.py"))


def name_of(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def modules_in(package: Path) -> list[str]:
    return sorted(
        path.stem
        for path in package.iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    )


def test_no_folder_is_too_large() -> None:
    sizes = {name_of(folder): [lines_of(file) for file in folder.glob("*.py")] for folder in packages()}
    large = {name: (len(sizes), sum(sizes)) for name, sizes in sizes.items() if len(sizes) > MAX_FILES}
    long = {name: sum(sizes) for name, sizes in sizes.items() if sum(sizes) > MAX_FOLDER_LINES}
    assert (large, long) == ({}, {})


def test_no_folder_of_unit_tests_has_too_many_files() -> None:
    folders = [UNIT, *(path for path in UNIT.rglob("*") if path.is_dir())]
    counts = {name_of(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MAX_FILES} == {}


def test_no_file_is_too_long() -> None:
    files = [file for folder in packages() for file in folder.glob("*.py")]
    lengths = {name_of(file): lines_of(file) for file in files}
    assert {name: lines for name, lines in lengths.items() if lines > LARGE.get(name, MAX_FILE_LINES)} == {}
    assert [name for name in LARGE if lengths.get(name, 0) <= MAX_FILE_LINES] == []


@pytest.mark.parametrize("root", ROOTS)
def test_the_init_of_each_package_names_all_its_modules(root: str) -> None:
    missing = {}
    for package in packages():
        if name_of(package).startswith(f"{root}/"):
            doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
            named = set(re.findall(r"`(\w+)`", doc))
            missing[name_of(package)] = [name for name in modules_in(package) if name != "__main__" and name not in named]
    assert {package: names for package, names in missing.items() if names} == {}


@pytest.mark.parametrize("root", ROOTS)
def test_the_init_of_each_package_names_no_module_that_is_gone(root: str) -> None:
    gone = {}
    for package in packages():
        if name_of(package).startswith(f"{root}/"):
            doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
            listed = re.findall(r"^\| `(\w+)` \|", doc, re.MULTILINE)
            gone[name_of(package)] = [name for name in listed if name not in modules_in(package)]
    assert {package: names for package, names in gone.items() if names} == {}


def test_the_folders_of_unit_tests_are_those_of_the_source() -> None:
    source = {folder.relative_to(ROOT / folder.relative_to(ROOT).parts[0] / "dynamo").as_posix() for folder in packages()}
    tested = {file.parent.relative_to(UNIT).as_posix() for file in UNIT.rglob("test_*.py")}
    assert sorted(folder for folder in tested - source if folder.split("/")[0] not in OTHERS) == []


def test_a_test_that_is_named_after_a_module_lies_where_the_module_does() -> None:
    homes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for package in packages():
        room = "/".join(package.relative_to(ROOT).parts[2:])
        for module in modules_in(package):
            # A package's own tests lie in it.
            homes[room.split("/")[0], module] |= {room, f"{room}/{module}"}
    astray = {}
    for file in UNIT.rglob("test_*.py"):
        folder = file.parent.relative_to(UNIT).as_posix()
        there = homes.get((folder.split("/")[0], file.stem.removeprefix("test_")), {folder})
        if folder not in there and f"{folder}/{file.name}" not in ABOUT_OTHERS:
            astray[f"{folder}/{file.name}"] = sorted(there)
    assert astray == {}


@pytest.mark.source_tree
def test_each_module_has_tests_that_its_name_leads_to() -> None:
    names = [name for name, file in modules().items() if name.startswith("dynamo.") and file.name != "__init__.py"]
    assert len(names) > 600
    assert [name for name in names if not find_tests(name)] == []


@pytest.mark.source_tree
@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("frontend.router.loads.table", "unit/frontend/router/loads/test_table.py"),
        ("worker.engine.vllm.speech", "unit/worker/engine/vllm/test_vllm_speech.py"),
        ("worker.compat.__main__", "integration/test_dynamo_workers.py"),
        ("frontend.api.openai.pooling.text_tensors", "unit/frontend/api/openai/pooling/test_text_tasks.py"),
    ],
    ids=["its name", "its folder's name and its own", "a process", "a module that imports it"],
)
def test_the_first_test_of_a_module_is_found_by(module: str, test: str) -> None:
    assert find_tests(f"dynamo.{module}")[0] == ROOT / "tests" / test


def test_a_name_that_a_package_passes_on_is_one_of_the_module_that_has_it() -> None:
    assert origin("dynamo.common.config", "load") == "dynamo.common.config.loading"
    assert origin("dynamo.common.config", "loading") == "dynamo.common.config.loading"


@pytest.mark.source_tree
def test_a_test_has_the_name_of_a_module_beside_it_or_is_about_several() -> None:
    unclear = set()
    for test in modules():
        package, _, stem = test.replace("tests.unit", "dynamo", 1).rpartition(".")
        if package.startswith("dynamo.") and package in modules() and stem.startswith("test_") and subject(test) is None:
            used = [name for name, using in users().items() if test in using and name in modules()]
            if len({name.split(".")[package.count(".") + 1] for name in used if name.startswith(f"{package}.")}) < 2:
                unclear.add(f"{'/'.join(package.split('.')[1:])}/{stem}.py")
    assert unclear == set(ABOUT_NO_MODULE)
