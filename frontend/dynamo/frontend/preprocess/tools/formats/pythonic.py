"""`[f(a=1), g(b="x")]`, with or without `<|python_start|>` and `<|python_end|>` around it: Llama 3.2 and 4, LFM 2 and others."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.names import tool_names
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader

MAX_LIST_CHARS = 64 * 1024
MAX_CODE_CHARS = 8 * 1024
"""Most of a list that is not in its strings. To parse it takes Python 15 ms, in which the event loop does nothing else
(2026-11-26, one core at 2.6 GHz)."""
MAX_DEPTH = 32
"""Deepest nesting of brackets in a list of calls."""
_MARKERS = Markers("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|eom_id|>", "<|eot_id|>")
_BEGINNING = re.compile(r"\[\s*+([A-Za-z_][\w.]*+)?\s*+(.?)", re.DOTALL)
_STRUCTURE = re.compile(r"""\\.|["'\[\](){}]|\\\Z""", re.DOTALL)
_STRING = r"""(?<!\w)(?:'(?:[^'\\\r\n]|\\[^\r\n])*+'|"(?:[^"\\\r\n]|\\[^\r\n])*+")(?!['"])"""
"""A string without a prefix, on one line."""
_STRINGS = re.compile(_STRING)
_HAS_ONLY_SUCH = re.compile(rf"""(?:[^'"]++|{_STRING})*+""")
"""No other strings are in a text, so that Python finds them where `_STRINGS` does."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(Reader):
    """A list of calls at the beginning, all of existing tools, is returned when it is complete."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._start)
        self._names = tool_names(tools)
        self._scan = _ListEnd()

    def _start(self) -> bool:
        stripped = self._text.lstrip()
        if not stripped:
            return False
        marker = _MARKERS.search(self._text)
        if marker is not None and not self._text[: marker.start()].strip():
            self._text = self._text[marker.end() :]
        elif _MARKERS.certain(self._text) < len(self._text) - len(stripped) + 1 and not self._ended:
            return False
        elif stripped[0] == "[":
            self._parts.content(self._text[: len(self._text) - len(stripped)])
            self._text = stripped
            self._scan = _ListEnd()
            self._step = self._in_list
        else:
            self._step = self._content
        return True

    def _in_list(self) -> bool:
        if not self._ended and len(self._text) <= MAX_NAME_CHARS and (begins := _BEGINNING.fullmatch(self._text)):
            name, follows = begins.groups()
            if not follows or (name and follows == "("):
                return False
        end = self._scan.find(self._text) if self._may_be_calls() else 0
        if end < 0 and not self._ended and len(self._text) <= MAX_LIST_CHARS:
            return False
        calls = _calls(self._text[:end]) if 0 < end <= MAX_LIST_CHARS and _code_chars(self._text[:end]) <= MAX_CODE_CHARS else []
        if calls and all(name in self._names for name, _ in calls):
            for name, arguments in calls:
                self._parts.call(name, arguments)
            self._text = self._text[end:]
            self._step = self._start
        else:
            self._step = self._content
        return True

    def _may_be_calls(self) -> bool:
        begins = _BEGINNING.match(self._text[:MAX_NAME_CHARS])
        return begins is not None and begins.group(1) in self._names and begins.group(2) == "("

    def _content(self) -> bool:
        return bool(self._until(_MARKERS, self._parts.content))


class _ListEnd:
    """Finds the end of a Python list in a growing text."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int:
        """Return the index after the end; -1 if there is none yet; 0 if there cannot be one."""
        while match := _STRUCTURE.search(text, self._position):
            mark = match.group()
            if mark == "\\":
                return -1
            self._position = match.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            elif mark in "[({":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    return 0
            elif mark in "])}":
                self._depth -= 1
                if not self._depth:
                    return self._position
        self._position = len(text)
        return -1


def _code_chars(text: str) -> int:
    """Return how many characters of a list are not in strings, or in strings that may contain code."""
    return len(_STRINGS.sub("", text) if _HAS_ONLY_SUCH.fullmatch(text) else text)


def _calls(text: str) -> Sequence[tuple[str, str]]:
    """Return names and JSON arguments; empty if `text` is not a list of calls with constants."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's warnings about a model's text are of no use to operators
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_call(item) for item in tree.elts]
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    """Return name and JSON arguments. Raises ValueError if `node` is not a call with constant keyword arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with names for all its arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument without a name, or twice")
        arguments[keyword.arg] = _value(keyword.value)
    return ast.unparse(node.func), msgspec.json.encode(arguments).decode()


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise ValueError("not a constant")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("JSON has only strings as keys")
