"""What tests may touch, and how long they may wait: private names of others, bounds of wall time, limits of waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.short_limits import short_limits
from tests.support.wall_time import upper_bounds

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parents[3]
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
