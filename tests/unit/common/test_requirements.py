"""Requirements: `constraints.txt` has a version of each that `make setup` installs, and production imports no other."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
ROOTS = ("common", "frontend", "worker", "planner", "local")

EXTRAS = ("fast", "llama", "local", "onnx", "otel", "store")
GROUPS = ("lint", "test")
"""What the Makefile installs into `.venv` with `constraints.txt`."""
BY_EXTRA = {"nkeys": "nats-py[nkeys]"}
"""Packages that a requirement's own extra brings."""
NOT_INSTALLED = {"benchmarks", "docs", "examples", "tests"}
"""Folders of the repository that a checkout can import, and that no installation has."""
NOT_FROZEN = {"setuptools"}
"""What `pip freeze`, which `constraints.txt` is made with, leaves out."""


@cache
def settings() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(lines: Iterable[str]) -> dict[str, str]:
    """Return the version of each package in `constraints.txt`."""
    pairs = (line.split("==") for line in lines if line.strip() and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def unpinned(requirements: Iterable[str], pins: Mapping[str, str]) -> list[str]:
    """Return the requirements, also those of what is required, that no pin fits."""
    waiting = [Requirement(text) for text in requirements]
    seen, missing = set[str](), set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        version = pins.get(name)
        if name not in NOT_FROZEN and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            missing.add(str(requirement))
        if key not in seen:
            seen.add(key)
            waiting += required_by(name, requirement.extras)
    return sorted(missing)


def required_by(name: str, extras: Iterable[str]) -> list[Requirement]:
    """Return what an installed package requires here; nothing of one that is not installed."""
    try:
        texts = distribution(name).requires or ()
    except PackageNotFoundError:
        return []
    here = [Requirement(text) for text in texts]
    return [each for each in here if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in ("", *extras))]


def test_each_requirement_of_the_environment_has_a_version_that_fits_in_the_constraints() -> None:
    project = settings()["project"]
    requirements = list(project["dependencies"])
    requirements += (text for extra in EXTRAS for text in project["optional-dependencies"][extra])
    requirements += (text for group in GROUPS for text in settings()["dependency-groups"][group])
    assert unpinned(requirements, pinned((ROOT / "constraints.txt").read_text().splitlines())) == []


def test_the_makefile_installs_the_extras_and_groups_whose_requirements_are_checked() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = makefile.partition("\n$(VENV)/.run:")[2].partition("\n$(VENV)/.profile:")[0]
    assert re.findall(r'--editable "\.\[([\w,]+)\]"', recipes) == [",".join(EXTRAS)]
    assert re.findall(r"--group (\w+)", recipes) == list(GROUPS)


def test_requirements_without_a_fitting_version_are_found() -> None:
    pins = pinned(["# first lines", "A_b==1.5", "pytest==1.0"])
    assert unpinned(["a-b>=1", "c>=2", "A.B>=2"], pins) == ["A.B>=2", "c>=2"]
    assert {"pytest>=2", "pluggy"} <= {re.sub(r"(?<=pluggy).*", "", text) for text in unpinned(["pytest>=2"], pins)}


def undeclared(tree: ast.Module, declared: set[str]) -> list[str]:
    """Return the imports of packages that are installed and that no requirement names, and of what is never installed."""
    owners = owners_of_modules()
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"dynamo"}
        strange = {top for top in tops if top in owners and not owners[top] & declared} | tops & NOT_INSTALLED
        found += [f"line {node.lineno}: {top}" for top in sorted(strange)]
    return found


@cache
def owners_of_modules() -> Mapping[str, set[str]]:
    return {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}


def declared_packages() -> set[str]:
    project = settings()["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    by_extra = {name for name, owner in BY_EXTRA.items() if any(text.startswith(owner) for text in texts)}
    return {canonicalize_name(Requirement(text).name) for text in texts} | by_extra


def test_production_imports_only_packages_that_it_requires() -> None:
    files = [file for root in ROOTS for file in sorted((ROOT / root / "dynamo").rglob("*.py"))]
    found = {file.relative_to(ROOT).as_posix(): undeclared(ast.parse(file.read_text()), declared_packages()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_import_that_no_requirement_names_is_found() -> None:
    source = """
import pytest, json
from numpy import array
def late():
    from pluggy.hooks import x
from . import y
from tests.support import z
"""
    assert undeclared(ast.parse(source), {"numpy"}) == ["line 2: pytest", "line 7: tests", "line 5: pluggy"]
