"""Finds waits whose limit a busy machine may reach, and loops that end without a word when their time is over."""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tests.support.waiting import WAIT_S, expiring
from tests.support.wall_time import CLOCKS, VIRTUAL

_MARK = expiring.__name__
_KEYWORDS = {"timeout", "network_timeout", "connection_timeout", "timeout_s", "within_s", "until_s", "client_timeout"}
_POSITIONS = {
    "asyncio.timeout": 0,
    "asyncio.timeout_at": 0,
    "asyncio.wait_for": 1,
    "join": 0,
    "result": 0,
    "select.select": 3,
    "settimeout": 0,
    "signal.alarm": 0,
    "wait": 0,
}
"""Where a function has its limit, by its name or by that of a method; functions of the modules themselves come on top."""
_OTHER_UNITS = {"InferenceRequest"}
"""What has a time-out in microseconds, for the queue of a model."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
Constants = dict[str, float]


def short_limits(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return, by module name, each limit below `WAIT_S` that is not marked, and each loop that ends silently.

    Modules that they have as text, such as those of Python models, count as theirs.
    """
    constants = {name: _constants(tree) for name, tree in trees.items()}
    positions = _positions(trees.values())
    found = {}
    for name, tree in trees.items():
        known = dict(constants[name])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = constants.get(node.module or "", {})
                known |= {alias.asname or alias.name: source[alias.name] for alias in node.names if alias.name in source}
        if here := [*_of(tree, known, positions, 0)]:
            found[name] = here
    return found


def _of(tree: ast.Module, constants: Constants, positions: Mapping[str, int], offset: int) -> Iterator[str]:
    for node in _in_real_time(tree):
        limits: list[ast.expr] = []
        match node:
            case ast.Call():
                limits = list(_limits(node, positions))
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                limits = list(_defaults(args))
            case ast.While(test=ast.BoolOp(op=ast.And(), values=values)) if any(map(_is_before, values)):
                yield f"line {offset + node.lineno}: while {ast.unparse(node.test)}"
            case ast.Assert(test=ast.Compare() as test) if _is_before(test) and _is_short_of(tree, test, constants):
                yield f"line {offset + node.lineno}: {ast.unparse(node)}"
            case ast.Constant(value=str(text)) if "\n" in text:
                yield from _of(_module(text), constants, positions, offset + node.lineno - 1)
        for limit in limits:
            if (seconds := _seconds(limit, constants)) is not None and 0 < seconds < WAIT_S:
                yield f"line {offset + limit.lineno}: {ast.unparse(node) if isinstance(node, ast.Call) else ast.unparse(limit)}"


def _in_real_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes outside of decorators and of functions whose clock goes as the test wants it to."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        decorators = node.decorator_list if isinstance(node, _Function | ast.ClassDef) else []
        waiting += (child for child in ast.iter_child_nodes(node) if child not in decorators and not _is_virtual(child))


def _is_virtual(node: ast.AST) -> bool:
    return isinstance(node, _Function) and any(_is_named(each, VIRTUAL) for each in node.decorator_list)


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _positions(trees: Iterable[ast.Module]) -> dict[str, int]:
    """Return where functions have a limit among their positional arguments, by their names, if all of one name agree."""
    positions = defaultdict[str, set[int | None]](set)
    for function in (node for tree in trees for node in ast.walk(tree) if isinstance(node, _Function)):
        names = [arg.arg for arg in function.args.args if arg.arg not in ("self", "cls")]
        positions[function.name].add(next((number for number, name in enumerate(names) if name in _KEYWORDS), None))
    only = {name: next(iter(here)) for name, here in positions.items() if len(here) == 1}
    return {name: position for name, position in only.items() if position is not None}


def _limits(call: ast.Call, positions: Mapping[str, int]) -> Iterator[ast.expr]:
    name = ast.unparse(call.func)
    short = name.rpartition(".")[2]
    if short in _OTHER_UNITS:
        return
    position = _POSITIONS.get(name, positions.get(short))
    if position is None and isinstance(call.func, ast.Attribute):
        position = _POSITIONS.get(short)
    if position is not None:
        yield from call.args[position : position + 1]
    yield from (keyword.value for keyword in call.keywords if keyword.arg in _KEYWORDS)


def _defaults(args: ast.arguments) -> Iterator[ast.expr]:
    positional = [*args.posonlyargs, *args.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(reversed(positional), reversed(args.defaults), strict=False)]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    yield from (default for arg, default in pairs if default is not None and arg.arg in _KEYWORDS)


def _is_before(node: ast.expr) -> bool:
    """Whether it holds until a clock, read there, has come to some time."""
    match node:
        case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()]):
            return _reads_clock(left)
        case ast.Compare(ops=[ast.Gt() | ast.GtE()], comparators=[right]):
            return _reads_clock(right)
    return False


def _reads_clock(node: ast.expr) -> bool:
    calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return any(isinstance(func, ast.Attribute) and func.attr in CLOCKS for func in calls)


def _is_short_of(tree: ast.Module, test: ast.Compare, constants: Constants) -> bool:
    """Whether the time that the clock is compared with is not known to be `WAIT_S` after another."""
    names = {inner.id for inner in ast.walk(test) if isinstance(inner, ast.Name)}
    ends = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    seconds = [_seconds(end, constants) for end in ends if _reads_clock(end)]
    return not seconds or any(each is None or each < WAIT_S for each in seconds)


def _constants(tree: ast.Module) -> Constants:
    known: Constants = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if (number := _seconds(value, known)) is not None:
                    known[name] = number
    return known


def _seconds(node: ast.expr, constants: Constants) -> float | None:
    """Return the value of an expression, without what is not known of a sum; None if nothing is."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return constants.get(name)
        case ast.Call(func=func) if _is_named(func, _MARK):
            return None
        case ast.BinOp(left=left, op=operator, right=right):
            one, other = _seconds(left, constants), _seconds(right, constants)
            if isinstance(operator, ast.Add):
                return None if one is other is None else (one or 0) + (other or 0)
            if one is None or other is None:
                return None
            if isinstance(operator, ast.Mult):
                return one * other
            if isinstance(operator, ast.Div) and other:
                return one / other
    return None


def _module(text: str) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return ast.Module([], [])
