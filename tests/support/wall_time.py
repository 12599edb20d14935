"""Finds assertions that something took at most so long, by following what is read from clocks through a file and its imports.

An approximation: a name means the same everywhere in a function, an attribute and a function the same in a whole file.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["clock", "moment", "span"]
"""A function that reads a clock, what it returned, and a difference of two such."""
Kinds = frozenset[Kind]

CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "monotonic_ns", "perf_counter_ns", "process_time_ns", "time_ns"}
_PASS_ON = {
    *("abs", "float", "int", "max", "min", "round", "sum", "mean", "median"),
    *("dict", "enumerate", "filter", "iter", "list", "map", "next", "reversed", "set", "sorted", "tuple", "zip"),
    *("gather", "run", "to_thread", "wait_for"),
}
"""Functions whose result is made of their arguments, or is that of a function among them."""
_OF_CONTAINER = {"copy", "get", "items", "pop", "popleft", "setdefault", "total_seconds", "values"}
_INTO_CONTAINER = {"add", "append", "appendleft", "extend", "put_nowait", "setdefault", "update"}
_NONE: Kinds = frozenset()
VIRTUAL = "in_virtual_time"
"""The decorator of tests whose clock goes as they want it to."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BINDINGS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
    *(ast.Return, ast.Yield, ast.Call),
)


@dataclass(slots=True)
class Flow:
    """What the names of a file may hold that comes from a clock."""

    functions: defaultdict[str, Kinds] = field(default_factory=lambda: defaultdict(frozenset))
    """What they return, by name."""
    attributes: defaultdict[str, Kinds] = field(default_factory=lambda: defaultdict(frozenset))
    globals: defaultdict[str, Kinds] = field(default_factory=lambda: defaultdict(frozenset))

    def size(self) -> int:
        return sum(len(kinds) for names in (self.functions, self.attributes, self.globals) for kinds in names.values())


def upper_bounds(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return, by module name, each assertion of these modules that so much time has passed at most."""
    flows = {name: Flow() for name in trees}
    scopes = {name: [_Scope(part, flows[name]) for part in _parts(tree)] for name, tree in trees.items()}
    imports = {name: [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] for name, tree in trees.items()}
    importers = defaultdict[str, set[str]](set)
    for name, nodes in imports.items():
        for node in nodes:
            importers[node.module or ""].add(name)

    def size(name: str) -> int:
        return flows[name].size() + sum(scope.size() for scope in scopes[name])

    due = set(trees)
    while due:
        changed = set[str]()
        for name in sorted(due):
            before = size(name)
            _import(imports[name], flows[name], flows)
            for scope in scopes[name]:
                scope.follow()
            if size(name) != before:
                changed |= {name} | importers[name]
        due = changed
    found = {name: [bound for scope in scopes[name] for bound in scope.bounds()] for name in trees}
    return {name: bounds for name, bounds in found.items() if bounds}


def _parts(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module, for what is outside of functions, and its outermost functions that run in real time."""
    yield tree
    for node in tree.body:
        if isinstance(node, _Function):
            if not any(isinstance(decorator, ast.Name) and decorator.id == VIRTUAL for decorator in node.decorator_list):
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from (part for part in node.body if isinstance(part, _Function))


def _import(imports: list[ast.ImportFrom], flow: Flow, flows: Mapping[str, Flow]) -> None:
    for node in imports:
        source = flows.get(node.module or "", Flow())
        for alias in node.names:
            name = alias.asname or alias.name
            flow.functions[name] |= source.functions[alias.name]
            flow.globals[name] |= source.globals[alias.name]
            if node.module == "time" and alias.name in CLOCKS:
                flow.globals[name] |= {"clock"}
        for name, kinds in source.attributes.items():
            flow.attributes[name] |= kinds


class _Scope:
    """A function with those inside it, or a module without its functions."""

    def __init__(self, part: ast.AST, flow: Flow) -> None:
        self._flow = flow
        self._names = defaultdict[str, Kinds](frozenset) if isinstance(part, _Function) else flow.globals
        self._nodes = list(ast.walk(part)) if isinstance(part, _Function) else list(_outside_functions(part))
        self._bindings = [node for node in self._nodes if isinstance(node, _BINDINGS)]
        inners = [node for node in self._nodes if isinstance(node, _Function)]
        self._of_function = {id(node): inner.name for inner in inners for node in _own(inner)}

    def size(self) -> int:
        return sum(len(kinds) for kinds in self._names.values())

    def follow(self) -> None:
        """Add what the statements bind."""
        for node in self._bindings:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind(target, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                    self._bind(target, value)
                case ast.AugAssign(target=target, value=value):
                    self._add(target, self.kinds(value))
                case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                    self._add(target, self.kinds(value))
                case ast.comprehension(target=target, iter=value):
                    self._add(target, self.kinds(value))
                case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                    self._add(target, self.kinds(value))
                case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                    if name := self._of_function.get(id(node)):
                        self._flow.functions[name] |= self.kinds(value) - {"clock"}
                case ast.Call(func=ast.Attribute(value=container, attr=name), args=args) if name in _INTO_CONTAINER:
                    for arg in args:
                        self._add(container, self.kinds(arg))

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case (ast.Tuple(elts=targets), ast.Tuple(elts=values)) if len(targets) == len(values):
                for inner, part in zip(targets, values, strict=True):
                    self._bind(inner, part)
            case _:
                self._add(target, self.kinds(value))

    def _add(self, target: ast.expr, kinds: Kinds) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] |= kinds
            case ast.Attribute(attr=name):
                self._flow.attributes[name] |= kinds
            case ast.Subscript(value=inner) | ast.Starred(value=inner):
                self._add(inner, kinds)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for inner in targets:
                    self._add(inner, kinds)

    def kinds(self, node: ast.expr | None) -> Kinds:
        """Return what the value of an expression may be, or contain."""
        match node:
            case ast.Name(id=name):
                return self._names[name] | self._flow.globals[name]
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in CLOCKS:
                return frozenset({"clock"})
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "utcnow"):
                return frozenset({"clock"})
            case ast.Attribute(attr=name):
                return self._flow.attributes[name] | (frozenset({"clock"}) if name in CLOCKS else _NONE)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                spans = (self.kinds(left) | self.kinds(right)) & {"span"}
                return spans | {"span"} if "moment" in self.kinds(left) else spans
            case ast.BinOp(left=left, right=right):
                return (self.kinds(left) | self.kinds(right)) - {"clock"}
            case ast.DictComp(value=value):
                return self.kinds(value)
            case ast.ListComp(elt=value) | ast.SetComp(elt=value) | ast.GeneratorExp(elt=value):
                return self.kinds(value)
            case ast.Dict(values=values) | ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values):
                return self._any(values)
            case ast.BoolOp(values=values):
                return self._any(values)
            case ast.IfExp(body=one, orelse=other):
                return self._any([one, other])
            case ast.Await(value=value) | ast.Subscript(value=value) | ast.Starred(value=value) | ast.UnaryOp(operand=value):
                return self.kinds(value)
            case ast.NamedExpr(value=value):
                return self.kinds(value)
        return _NONE

    def _any(self, values: list[ast.expr]) -> Kinds:
        return _NONE.union(*(self.kinds(value) for value in values))

    def _call(self, call: ast.Call) -> Kinds:
        if "clock" in self.kinds(call.func):
            return frozenset({"moment"})
        match call.func:
            case ast.Name(id=name):
                container = _NONE
            case ast.Attribute(value=value, attr=name):
                container = self.kinds(value) if name in _OF_CONTAINER else _NONE
            case _:
                return _NONE
        given = _NONE
        if name in _PASS_ON:
            called = [self._flow.functions[arg.id] for arg in call.args if isinstance(arg, ast.Name)]
            given = self._any(call.args).union(*called)
        return (self._flow.functions[name] | container | given) - {"clock"}

    def bounds(self) -> Iterator[str]:
        """Yield each assertion that a span is small, and each `if` that fails a test when one is large."""
        for node in self._nodes:
            match node:
                case ast.Assert(test=test):
                    filters = {id(inner) for part in ast.walk(test) for inner in _filters(part)}
                    filters |= {id(inner.operand) for inner in ast.walk(test) if isinstance(inner, ast.UnaryOp)}
                    compares = [inner for inner in ast.walk(test) if isinstance(inner, ast.Compare)]
                    if any(self._is_small(c) or (id(c) in filters and self._is_large(c)) for c in compares):
                        yield f"line {node.lineno}: {ast.unparse(node)}"
                case ast.If(test=test, body=body) if any(isinstance(inner, ast.Raise) or _is_fail(inner) for inner in body):
                    if any(self._is_large(inner) for inner in ast.walk(test) if isinstance(inner, ast.Compare)):
                        yield f"line {node.lineno}: if {ast.unparse(test)}"

    def _is_small(self, compare: ast.Compare) -> bool:
        """Whether it holds if a span is small, or of a certain length."""
        match compare:
            case ast.Compare(left=left, ops=[ast.In()]) if "span" in self.kinds(left):
                return True
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Call(func=ast.Attribute(attr="approx"))]):
                return "span" in self.kinds(left)
        return any(
            "span" in self.kinds(smaller if isinstance(operator, ast.Lt | ast.LtE) else larger)
            for smaller, operator, larger in _pairs(compare)
        )

    def _is_large(self, compare: ast.Compare) -> bool:
        return any(
            "span" in self.kinds(larger if isinstance(operator, ast.Lt | ast.LtE) else smaller)
            for smaller, operator, larger in _pairs(compare)
        )


def _pairs(compare: ast.Compare) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    values = [compare.left, *compare.comparators]
    for left, operator, right in zip(values, compare.ops, values[1:], strict=False):
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            yield left, operator, right


def _filters(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield from ast.walk(condition)


def _is_fail(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="fail"))):
            return True
        case ast.Assert(test=ast.Constant(value=False)):
            return True
    return False


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield from _outside_functions(child)


def _own(function: _Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for statement in function.body:
        if not isinstance(statement, _Function):
            yield from _outside_functions(statement)
