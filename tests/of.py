"""Find the tests of modules: `python -m tests.of dynamo.frontend.api.capacity`, or paths of files.

First those of the module's name: `test_MODULE.py` and `test_MODULE_*.py` in its folder below `tests/unit/`, where the name of the
folder may come before. Then those that import it or run it, nearest folder first; without any, those of modules that import it.
"""

import ast
import os
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {f"{root}/dynamo": root for root in ("common", "frontend", "worker", "planner", "local")} | {"tests": "."}
"""The folders that are searched, and where the names of their modules begin."""


@cache
def modules() -> dict[str, Path]:
    """Return the files of all modules, packages and tests by dotted names."""
    files = [(file, ROOT / base) for folder, base in FOLDERS.items() for file in (ROOT / folder).rglob("*.py")]
    return {".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): file for file, base in files}


@cache
def users() -> dict[str, set[str]]:
    """Return the modules and tests that import each module, take its names from its package, or run it as a process."""
    found: dict[str, set[str]] = defaultdict(set)
    for user, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [origin(node.module or "", name) for name in names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [f"{node.value}.__main__"]
            for name in names:
                found[name].add(user)
    return found


@cache
def origin(module: str, name: str) -> str:
    """Return the module that `from module import name` takes a name from."""
    file = modules().get(module, ROOT)
    body = ast.parse(file.read_text()).body if file.name == "__init__.py" else []
    passed_on = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return f"{module}.{name}" if f"{module}.{name}" in modules() else passed_on.get(name) or module


@cache
def subject(test: str) -> str | None:
    """Return the module or package that a test of `tests/unit/` is named after, or None."""
    package, _, stem = test.replace("tests.unit", "dynamo", 1).rpartition(".")
    folder = package.rpartition(".")[2]
    inside = {module.rpartition(".")[2].strip("_"): module for module in modules() if module.rpartition(".")[0] == package}
    names = {folder: package} | {f"{folder}_{name}": module for name, module in inside.items()} | inside
    return names.get(max((name for name in names if f"{stem}_".startswith(f"test_{name}_")), key=len, default=""))


def find_tests(module: str) -> list[Path]:
    """Return the tests of a module, or of all modules of a package: first those of its name, then the nearest."""
    home = ROOT.joinpath("tests", "unit", *module.split(".")[1:-1])
    wanted = {name for name in modules() if f"{name}.".startswith(f"{module}.")}
    seen, found = set[str](), dict[Path, bool]()
    while wanted and not found:
        using = set[str]().union(*(users().get(name, ()) for name in wanted))
        tests = [name for name in modules() if ".test_" in name and (name in using or subject(name) in wanted)]
        found = {modules()[test]: subject(test) not in wanted for test in tests}
        seen, wanted = seen | wanted, using - seen
    return sorted(found, key=lambda file: (found[file], len(Path(os.path.relpath(file, home)).parts), file))


if __name__ == "__main__":
    paths = {str(file): name for name, file in modules().items()}
    for asked in sys.argv[1:]:
        name = paths.get(str(Path(asked).resolve()), asked)
        if name not in modules():
            sys.exit(f"neither a module nor the file of one: {asked}")
        print(*(file.relative_to(ROOT) for file in find_tests(name)), sep="\n")
