"""Rules of tests that neither pytest nor ruff checks: that each is collected, can fail, and sleeps only for what it is about."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import expiring
from tests.support.wall_time import VIRTUAL

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "tests").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
RAISING = {"check_guided", "check_is_local", "check_settings", "decode_batch", "validate"}
"""Functions that a test calls as its only assertion: they raise what the test would fail with."""
LET_OFF = {"tests/unit/frontend/api/test_every_operation.py": 1}  # for operations that name no model
"""How often tests of a file may return before they have asserted something."""
MARKERS = {"filterwarnings", "skip", "timeout", "xfail"}
"""Markers with which a test that fails is green, or one that works fails on a busy machine."""
LONG_TIMEOUT_S = 600
LEFT_OUT_BY = {"collect_ignore", "collect_ignore_glob", "pytest_collection_modifyitems", "pytest_ignore_collect"}
"""Names by which pytest lets a conftest leave tests out, of which no report tells."""

PLACES = {"enabled", "endpoints", "host", "namespace", "port", "servers"}
"""Options of where something is, which fixtures set."""
FIXTURES = ("deployment", "edge", "every_operation", "fleet", "http_edge", "processes", "sim_fleet")
"""Modules of `tests/support` that start frontends and workers, or parts of them."""
SET_BY_SUPPORT = {
    "tests/support/fleet.py": {"--model"},  # a default that callers replace
    "tests/support/processes.py": {
        "--grpc",
        "--http-port",
        "--grpc-port",
        "--namespace",
        "--etcd-endpoints",
        "--nats-servers",
        "--status-port",
    },
    "tests/support/every_operation.py": {"value"},  # of no option
    "tests/support/sim_fleet.py": {"mode", "speculative_ttl_s"},  # `KV`, which tests name
}
"""Options that fixtures and fakes set to what production has not: by flags and keywords."""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in FILES}


def is_fixture(function: Function) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield each name that is used, also as an argument, which may be a fixture, and in texts, as fixtures are named too."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w+", text)


def uncollected(trees: dict[str, ast.Module]) -> list[str]:
    """Return functions and classes that look like tests, or like parts of them, and that no run of pytest would call."""
    uses = Counter(name for tree in trees.values() for name in names_in(tree))
    found = []
    for file, tree in trees.items():
        is_collected = Path(file).name.startswith("test_")
        for node in (each for each in tree.body if isinstance(each, Function)):
            is_test = node.name.startswith("test_")
            if is_test and not is_collected:
                found.append(f"{file}: {node.name}: pytest collects files named test_*.py")
            if is_collected and not is_test and not node.decorator_list and not uses[node.name]:
                found.append(f"{file}: {node.name}: no test calls it")
        inner = [each for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef) for each in node.body]
        found += [
            f"{file}: {each.name}: it is inside of another function or class"
            for each in inner
            if isinstance(each, Function) and each.name.startswith("test_")
        ]
    return found


def test_every_test_is_collected(trees: dict[str, ast.Module]) -> None:
    assert uncollected(trees) == []


def test_tests_that_are_not_collected_are_found() -> None:
    source = """
def tets_a(): ...
def check(): ...
def helper(): ...
def test_b(): helper()
class ModelTests:
    def test_c(self): ...
def test_d():
    def test_e(): ...
@pytest.fixture(autouse=True)
def quiet(): ...
"""
    trees = {"tests/test_x.py": ast.parse(source), "tests/x_tests.py": ast.parse("def test_f(): ...\ndef helper(): ...")}
    names = [line.split(": ")[1] for line in uncollected(trees)]
    assert names == ["tets_a", "check", "test_c", "test_e", "test_f"]


def test_every_function_with_a_marker_is_collected_as_a_test(trees: dict[str, ast.Module]) -> None:
    functions = [(file, node) for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, Function)]
    forgotten = {
        f"{file}: {node.name}"
        for file, node in functions
        if any(ast.unparse(decorator).startswith("pytest.mark.") for decorator in node.decorator_list)
        if not node.name.startswith("test_")
    }
    assert forgotten == set()


def asserts(node: ast.AST) -> bool:
    for inner in ast.walk(node):
        match inner:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if name in RAISING or name in ("raises", "fail") or name.startswith("assert"):
                    return True
    return False


def without_assertion(trees: dict[str, ast.Module]) -> list[str]:
    """Return the tests that assert nothing, not even in what they use: each name stands for all functions and classes of it."""
    functions = defaultdict[str, list[ast.AST]](list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef):
                functions[node.name].append(node)
    asserting = {name for name, nodes in functions.items() if any(map(asserts, nodes))}
    used = {name: {inner for node in nodes for inner in names_in(node)} for name, nodes in functions.items()}
    while more := {name for name in used.keys() - asserting if used[name] & asserting}:
        asserting |= more
    return [
        f"{file}: {node.name}"
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, Function) and node.name.startswith("test_") and not is_fixture(node)
        if not asserts(node) and not set(names_in(node)) & asserting
    ]


def vacuous(tree: ast.AST) -> Iterator[str]:
    """Yield assertions that hold whatever was done: of a constant, or that something equals itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=ast.Constant(value=value)) if value:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
                if isinstance(left, ast.Name | ast.Attribute) and ast.dump(left) == ast.dump(right):
                    yield f"line {node.lineno}: {ast.unparse(node)}"


def let_off(tree: ast.Module) -> Iterator[str]:
    """Yield where a test ends without a word: at an `if` that only returns, or as it catches its own failure."""
    for test in (node for node in tree.body if isinstance(node, Function) and node.name.startswith("test_")):
        for node in test.body:
            if isinstance(node, ast.If) and isinstance(node.body[0], ast.Return) and not node.orelse:
                yield f"line {node.lineno}: if {ast.unparse(node.test)}: return"
        for node in ast.walk(test):
            if isinstance(node, ast.Try) and any(isinstance(each, ast.Assert) for part in node.body for each in ast.walk(part)):
                for handler in node.handlers:
                    if catches_failures(handler) and not any(map(asserts, handler.body)):
                        yield f"line {handler.lineno}: {ast.unparse(handler).splitlines()[0]}"


def catches_failures(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"BaseException"}
    return bool(names & {"AssertionError", "BaseException", "Exception"})


def test_no_test_ends_without_a_word(trees: dict[str, ast.Module]) -> None:
    found = {file: list(let_off(tree)) for file, tree in trees.items()}
    assert {file: lines for file, lines in found.items() if len(lines) > LET_OFF.get(file, 0)} == {}


def test_ends_without_a_word_are_found() -> None:
    source = """
def test_a():
    if not gpu(): return
    try: assert x
    except Exception: return
    try: assert x
    except (OSError, AssertionError): log()
    try: assert x
    except Exception as error: assert str(error)
    try: assert x
    except OSError: pass
    try: x()
    except Exception: return
    if x():
        assert y
        return
def helper():
    if x: return
"""
    assert [found.partition(":")[0] for found in let_off(ast.parse(source))] == ["line 3", "line 5", "line 7"]


def test_every_test_can_fail(trees: dict[str, ast.Module]) -> None:
    assert without_assertion(trees) == []
    assert {file: found for file, tree in trees.items() if (found := list(vacuous(tree)))} == {}


def test_tests_that_cannot_fail_are_found() -> None:
    source = """
def test_a(): list(range(3))
def test_b(): assert True
def test_c(): assert value == value
def test_d(): helper()
def test_e(): other()
def helper(): inner()
def inner(): assert x
def other(): ...
def test_f():
    with pytest.raises(ValueError): parse()
"""
    tree = ast.parse(source)
    assert without_assertion({"x": tree}) == ["x: test_a", "x: test_e"]
    assert list(vacuous(tree)) == ["line 3: assert True", "line 4: assert value == value"]


def sleeps(tree: ast.Module) -> Iterator[str]:
    """Yield the sleeps of tests and fixtures in real time that `expiring` does not mark and that are not between two looks."""
    waiting: list[ast.AST] = [
        node
        for node in tree.body
        if isinstance(node, Function) and (node.name.startswith("test_") or is_fixture(node))
        if not any(isinstance(decorator, ast.Name) and decorator.id == VIRTUAL for decorator in node.decorator_list)
    ]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.While() | ast.For(iter=ast.Call(func=ast.Attribute(value=ast.Name(id="itertools"), attr="count"))):
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio" | "time"), attr="sleep") | ast.Name(id="sleep")):
                if not is_turn(node.args[0]) and not is_marked(node.args[0]):
                    yield f"line {node.lineno}: {ast.unparse(node)}"
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, Function | ast.Lambda))


def is_turn(seconds: ast.expr) -> bool:
    return isinstance(seconds, ast.Constant) and seconds.value == 0


def is_marked(seconds: ast.expr) -> bool:
    return isinstance(seconds, ast.Call) and ast.unparse(seconds.func) == expiring.__name__


def test_no_test_sleeps_to_wait_for_something(trees: dict[str, ast.Module]) -> None:
    assert {file: found for file, tree in trees.items() if (found := list(sleeps(tree)))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    time.sleep(0.1)",
        "async def test_a():\n    await asyncio.sleep(LONG_S)",
        "def test_a():\n    for _ in range(20):\n        sleep(0.05)",
        "@pytest.fixture\ndef server():\n    start()\n    time.sleep(2)",
    ],
)
def test_sleeps_are_found(source: str) -> None:
    assert len(list(sleeps(ast.parse(source.replace("test()", "test_a()"))))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "async def test_a():\n    await asyncio.sleep(0)",
        "async def test_a():\n    await asyncio.sleep(expiring(0.1))",
        "async def test_a():\n    while not done():\n        await asyncio.sleep(0.1)",
        "@in_virtual_time\nasync def test_a():\n    await asyncio.sleep(5)",
        "def test_a():\n    def model():\n        time.sleep(1)\n    serve(model)",
    ],
)
def test_other_sleeps_are_not(source: str) -> None:
    assert list(sleeps(ast.parse(source))) == []


def markers(tree: ast.AST) -> Iterator[str]:
    """Yield the uses of `MARKERS`; a time-out for what hangs is as long as `LONG_TIMEOUT_S`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="timeout"), args=[ast.Constant(value=int() | float() as limit)]):
                if limit < LONG_TIMEOUT_S and ast.unparse(node.func) == "pytest.mark.timeout":
                    yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Attribute(attr=name) if name in MARKERS - {"timeout"} and ast.unparse(node.value) == "pytest.mark":
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_marker_makes_a_test_green_that_fails_or_gives_it_little_time(trees: dict[str, ast.Module]) -> None:
    assert {file: found for file, tree in trees.items() if (found := list(markers(tree)))} == {}


def test_such_markers_are_found() -> None:
    source = """
@pytest.mark.xfail(reason="x")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skip
@pytest.mark.timeout(30)
@pytest.mark.skipif(os.geteuid() != 0, reason="no root")
def test_a(): ...
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
"""
    assert [line.partition(":")[0] for line in markers(ast.parse(source))] == [f"line {n}" for n in (4, 5, 2, 3)]


def test_no_other_conftest_leaves_tests_out(trees: dict[str, ast.Module]) -> None:
    found = {file: LEFT_OUT_BY & set(defined_in(tree)) for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == {
        "tests/conftest.py": {"collect_ignore"},
        "tests/clients/conftest.py": {"collect_ignore_glob"},  # where their packages are not installed
        "tests/gpu/conftest.py": {"collect_ignore_glob"},  # as PyTorch, without which there is no such environment
    }


def defined_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def set_options(tree: ast.AST) -> Iterator[str]:
    """Yield flags, and keywords with which options are made or replaced that have a value of their own there."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"--[a-z][a-z-]+", text):
                yield text
            case ast.Call(func=ast.Name(id=called), keywords=keywords) if called.endswith("Options") or called == "replace":
                yield from (each.arg for each in keywords if each.arg and each.arg not in PLACES and is_fixed(each.value))


def is_fixed(value: ast.expr) -> bool:
    """Return whether a value follows from nothing that a caller gives; options made in it are looked at by themselves."""
    names = (node.id for node in ast.walk(value) if isinstance(node, ast.Name))
    return not isinstance(value, ast.Call) and not any(name[0].islower() for name in names)


def test_fixtures_configure_what_production_has_by_default(trees: dict[str, ast.Module]) -> None:
    found = {f"tests/support/{name}.py": set(set_options(trees[f"tests/support/{name}.py"])) for name in FIXTURES}
    assert {file: names for file, names in found.items() if names - SET_BY_SUPPORT.get(file, set())} == {}


def test_options_that_fixtures_set_are_found() -> None:
    source = """
run("dynamo.worker", "--lease-ttl", "1", f"--port={port}", "--namespace")
config = FrontendConfig(http=HttpOptions(port=0, idle_timeout_s=1.0), log=LogOptions(level=level))
etcd = EtcdOptions(endpoints=(url,), lease_ttl_s=2 * SHORT_S, user=self.user)
replace(options, drain_timeout_s=0)
"""
    assert set(set_options(ast.parse(source))) == {
        "--lease-ttl",
        "--namespace",
        "idle_timeout_s",
        "lease_ttl_s",
        "drain_timeout_s",
    }


def addresses(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that listen elsewhere than at 127.0.0.1, or at a port that another process may have."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not re.search(
            r"(?:^|\.)(?:bind|start_server|create_server)$|Server$", ast.unparse(node.func)
        ):
            continue
        texts = [ast.literal_eval(each) for arg in node.args for each in constants_of(arg)]
        texts += [
            ast.literal_eval(keyword.value)
            for keyword in node.keywords
            if keyword.arg in ("host", "port") and constants_of(keyword.value)
        ]
        if any(text in ("0.0.0.0", "::") or (type(text) is int and 1024 <= text < 65536) for text in texts):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def constants_of(node: ast.expr) -> list[ast.Constant]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return [part for part in parts if isinstance(part, ast.Constant)]


def test_tests_listen_on_this_machine_alone_and_at_ports_that_are_free(trees: dict[str, ast.Module]) -> None:
    assert {file: found for file, tree in trees.items() if (found := list(addresses(tree)))} == {}


def test_other_addresses_are_found() -> None:
    source = """
listening.bind(("0.0.0.0", 0))
listening.bind(("127.0.0.1", 48123))
listening.bind(("127.0.0.1", 0))
asyncio.start_server(handle, "127.0.0.1", 8123)
asyncio.start_server(handle, host="::", port=0)
ThreadingHTTPServer(("127.0.0.1", 0), Handler)
"""
    assert [line.partition(":")[0] for line in addresses(ast.parse(source))] == [f"line {n}" for n in (2, 3, 5, 6)]
