"""Rules of the source tree that no other tool checks: what tests may touch, and what the import contracts cover."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.short_limits import short_limits
from tests.support.wall_time import upper_bounds

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parents[3]
ROOTS = ("protos", "common", "frontend", "worker", "planner", "local")
TESTS = sorted((ROOT / "tests").rglob("*.py"))

ALLOWED = {
    "tests/simulation/clock.py": 1,  # asyncio's: its loop runs handles so
    "tests/simulation/history.py": 1,  # asyncio's: tasks of a process that is killed end without a warning
    "tests/simulation/observers.py": 29,  # states that no public name shows: one that is renamed fails there
    "tests/simulation/test_simulation.py": 1,  # a defect that is put into the batch runner
}
"""How often a file may use a private name of another module, for which there is no other way."""

PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Documented names that look private: those of named tuples, and `os._exit`."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "delitem"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__") and name not in PUBLIC


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """What Python reads in all files of the tests: read once, and let go after this module, since it takes much memory."""
    return {file: ast.parse(file.read_text()) for file in TESTS}


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield each use of a private name that the file itself does not define: attributes, imports, and names in `setattr`."""
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


def test_no_test_uses_a_private_name_of_another_module(trees: dict[Path, ast.Module]) -> None:
    uses = {str(file.relative_to(ROOT)): list(private_uses(tree)) for file, tree in trees.items()}
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
    uses = {use.partition(": ")[2] for use in private_uses(ast.parse(source))}
    assert uses == {"import _secret", "monkeypatch.setattr(a, '_d', 1)", "a._other", "a.b._c"}


def test_no_test_asserts_that_something_took_at_most_so_long(trees: dict[Path, ast.Module]) -> None:
    assert upper_bounds({module_name(file): tree for file, tree in trees.items()}) == {}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


PROBE = """
@dataclass
class Probe:
    worst_s: float = 0.0
    def watch(self):
        started = time.perf_counter()
        took = time.perf_counter() - started
        self.worst_s = max(self.worst_s, took - waited())
"""


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - begun < 1",
        "assert 0.04 < loop.time() - start <= 1, 'soon'",
        "def test():\n    start = time.perf_counter()\n    took = round(time.perf_counter() - start, 2)\n    assert 1 > took",
        "from time import monotonic as now\ndef test():\n    begun = now()\n    assert now() - begun < 1",
        "def test():\n    clock = time.monotonic\n    begun, n = clock(), 0\n    assert clock() - begun < 1",
        "def test():\n    best = float('inf')\n    best = min(best, time.time() - begun)\n    assert best < LIMIT_S",
        "def test():\n    took = []\n    took.append(time.time() - begun)\n    assert sorted(took)[50] < LIMIT_S",
        "def test():\n    took = time.time() - begun\n    if took > LIMIT_S:\n        pytest.fail('late')",
        "begun = datetime.now(UTC)\nassert (datetime.now(UTC) - begun).total_seconds() < 1",
        "begun = time.monotonic()\nassert not time.monotonic() - begun > 1",
        "begun = time.monotonic()\nassert time.monotonic() - begun == pytest.approx(0.1, abs=0.05)",
        "begun = time.monotonic()\nassert int(time.monotonic() - begun) in range(2)",
        "def took():\n    return time.time() - begun\nasync def test():\n    assert await asyncio.to_thread(took) < 1",
        PROBE + "def test():\n    assert Probe().worst_s < MAX_S",
        """
from x.probe import Probe
def attack():
    held = {}
    for name in ATTACKS:
        held[name] = min(held.get(name, 60.0), Probe().worst_s)
    return held
async def test():
    held = await asyncio.to_thread(attack)
    assert {name: seconds for name, seconds in held.items() if seconds > MAX_HOLD_S} == {}
""",
    ],
)
def test_upper_bounds_of_time_are_found(source: str) -> None:
    assert len(upper_bounds({"x.probe": ast.parse(PROBE), "x.test": ast.parse(source)})["x.test"]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert loop.time() - start > 0.04 and clock.now - start < 1",
        "def test():\n    begun = time.thread_time()\n    assert time.thread_time() - begun < 1",
        "def test():\n    took = time.time() - begun\n    print(took)\n    assert responses < 10",
        "def test():\n    while time.monotonic() - begun < 60:\n        assert work() < 3",
        "@in_virtual_time\nasync def test():\n    begun = loop.time()\n    assert loop.time() - begun < 2",
        "def other():\n    took = time.time() - begun\ndef test(took):\n    assert took < 3",
    ],
)
def test_what_takes_longer_on_a_busy_machine_without_failing_is_no_bound(source: str) -> None:
    assert upper_bounds({"x.test": ast.parse(source)}) == {}


SIMULATED = {"tests.simulation.history", "tests.simulation.kept"}
"""Modules in which no time passes but that of simulated clocks."""


def test_no_limit_of_a_wait_is_reached_by_a_busy_machine(trees: dict[Path, ast.Module]) -> None:
    found = short_limits({module_name(file): tree for file, tree in trees.items()})
    assert {name: limits for name, limits in found.items() if name not in SIMULATED} == {}


@pytest.mark.parametrize(
    "source",
    [
        "async with asyncio.timeout(0.2):\n    await news.wait()",
        "LIMIT_S = 0.2\nasync with asyncio.timeout_at(loop.time() + 2 * LIMIT_S):\n    await news.wait()",
        "await asyncio.wait_for(queue.get(), 0.5)",
        "done, _ = await asyncio.wait(tasks, timeout=5)",
        "client = HttpClient(url, timeout_s=10)",
        "httpx2.AsyncClient(timeout=1.0)",
        "thread.join(10)",
        "from x.limits import SHORT_S\nthread.join(SHORT_S)",
        "pool.submit(work).result(1)",
        "assert select.select([pipe], [], [], 0.5)[0]",
        "signal.alarm(2)",
        "def status(stream, within_s=10.0): ...",
        "def status(self, stream, within_s): ...\nclient.status(1, 5)",
        "async def ends(*, timeout_s: float = 2): ...",
        "def test():\n    until = time.monotonic() + 5\n    while not is_done():\n        assert time.monotonic() < until",
        "assert time.monotonic() < until",
        "until = time.monotonic() + 500\nwhile not is_done() and time.monotonic() < until:\n    time.sleep(0.1)",
        'MODEL = """\nimport time\nclass Model:\n    def execute(self):\n        self.go.wait(5)\n"""',
    ],
)
def test_limits_that_a_busy_machine_reaches_are_found(source: str) -> None:
    trees = {"x.limits": ast.parse("SHORT_S = 3"), "x.test": ast.parse(source)}
    assert [len(limits) for limits in short_limits(trees).values()] == [1]


@pytest.mark.parametrize(
    "source",
    [
        "async with asyncio.timeout(120):\n    await news.wait()",
        "async with asyncio.timeout(0):\n    await news.wait()",
        "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(queue.get(), expiring(0.1))",
        "LIMIT_S = expiring(0.1)\nthread.join(LIMIT_S)",
        "@in_virtual_time\nasync def test():\n    await asyncio.wait_for(queue.get(), 5)",
        "until = time.monotonic() + 120\nwhile not is_done():\n    assert time.monotonic() < until",
        "', '.join(names)",
        "pb_utils.InferenceRequest(model_name='m', timeout=7)",
    ],
)
def test_a_limit_that_is_long_or_marked_is_none_that_a_busy_machine_reaches(source: str) -> None:
    assert short_limits({"x.test": ast.parse(source)}) == {}


UNNAMED = re.compile(r"(?i)(?<![a-z])(?:some|no|any|every)body|(?<![a-z])(?:whoever|anyone|everyone|someone|no one)(?![a-z])")
"""Words that hide who acts: a client, a frontend, a worker, an operator."""


def test_who_acts_is_named() -> None:
    texts = [file for suffix in ("py", "md", "toml", "yaml") for file in ROOT.rglob(f"*.{suffix}")]
    own = [file for file in texts if file.name != "CHANGELOG.md" and not is_generated(file) and file != Path(__file__)]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in own
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if UNNAMED.search(line)
    ]
    assert len(own) > 500 and found == []


def is_generated(file: Path) -> bool:
    """Return whether a file belongs to an environment, a build or a run, not to the repository."""
    return any(part.startswith((".", "node_modules", "build", "dist")) for part in file.relative_to(ROOT).parts)


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


def test_every_function_with_a_marker_is_collected_as_a_test(trees: dict[Path, ast.Module]) -> None:
    functions = [
        (file, node)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    forgotten = {
        f"{file.relative_to(ROOT)}: {node.name}"
        for file, node in functions
        if any(ast.unparse(decorator).startswith("pytest.mark.") for decorator in node.decorator_list)
        if not node.name.startswith("test_")
    }
    assert forgotten == set()


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
    files = [file for file in ROOT.rglob("*.py") if not is_generated(file)]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in without_subject(file.read_text())]
    assert len(files) > 500 and sorted(found) == []


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
