"""What structured output may cost, by its text alone: a schema of 200 bytes can ask for a billion items.

Checked by frontends before a request travels, and again by workers, which may get it from a frontend of another version. Nothing
is compiled here: each value is looked at once, and what an engine would multiply out is counted, so that a check takes about as
long as reading the schema. What an engine makes of a grammar is bounded where that is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import msgspec

from dynamo.common.errors import HarmfulRequest, InvalidRequest

GUIDES = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_GUIDE_CHARS = 256 << 10
"""Characters of a grammar, a structural tag, of all choices, and of all strings and keys of a schema."""
MAX_CHOICES = 1024
MAX_VALUES = 20_000
"""Values in a schema, keys not counted."""
MAX_DEPTH = 100
MAX_DEFINITIONS = 256
"""Different definitions that a schema refers to. Engines follow them recursively: some 800 in a row end the process of one."""
MAX_ITEMS = 10_000
MAX_LENGTH = 100_000
MAX_REPETITIONS = 1_000_000
"""The sum of all counts of one schema or grammar. llama.cpp takes 150 bytes for each item that an array must or may have."""
MAX_REPEATED = 10_000
"""Parts of a grammar with a count, such as `{3}`: to look at each takes a microsecond."""
MAX_MULTIPLES = 1_000
"""Numbers of `multipleOf` in a schema, each of which takes some microseconds."""
MAX_PATTERN_CHARS = 32 << 10
"""Characters of all patterns together."""
MAX_PATTERN_POSITIONS = 10_000
"""Characters that a pattern has once its repetitions are written out."""
MAX_MULTIPLE = 100_000
"""`multipleOf` without its decimal point: an automaton has one state for each remainder."""
MAX_COMBINATIONS = 10_000
"""Plain schemas that `allOf`, `anyOf`, `oneOf` and the references between them become once they are multiplied out."""

_ITEMS = frozenset({"minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_COUNTED = _ITEMS | _LENGTHS | {"multipleOf"}
_DATA = frozenset({"const", "enum", "default", "examples"})
_MAX_LEVELS = 200
# Possessive: a run of n spaces could otherwise be divided among its parts in n^3 ways, and digits in n.
_REPETITION = r"\{ *+(\d*+) *+(,?+) *+(\d*+) *+\}"
_ATOM = re.compile(rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|{_REPETITION}|[()|*+?]|.", re.DOTALL)
_REPEATED = re.compile(_REPETITION)

_Path: TypeAlias = tuple[Any, int, bool]
"""A value, how deep it lies, and whether it is data rather than a schema."""


class CostlyGuide(HarmfulRequest):
    """Structured output of which no engine should hear."""


def check_guided(guided: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequest, with the bound in words, for structured output that no engine should compile."""
    if guided is None:
        return
    if len(guided) != 1 or next(iter(guided)) not in GUIDES:
        raise InvalidRequest(f"structured output takes exactly one of {', '.join(GUIDES)}", param="guided")
    [(kind, value)] = guided.items()
    match kind, value:
        case "json_schema" | "structural_tag", str():
            _at_most("characters", len(value), MAX_GUIDE_CHARS, kind)
            _check_schema(_parsed(value, kind), kind)
        case "json_schema", _:
            _check_schema(value, kind)
        case "regex", str():
            _at_most("characters", len(value), MAX_PATTERN_CHARS, kind)
            _check_positions(value, kind)
        case "choice", [*choices]:
            _at_most("choices", len(choices), MAX_CHOICES, kind)
            _at_most("characters", sum(len(choice) for choice in choices if isinstance(choice, str)), MAX_GUIDE_CHARS, kind)
        case "grammar", str():
            _check_grammar(value)


def _at_most(what: str, count: int, most: int, kind: str) -> None:
    if count > most:
        shown = count if count < 10**18 else "10^18 or more"
        raise CostlyGuide(f"{kind} has {shown} {what}; at most {most} are allowed", param=kind)


def _parsed(text: str, kind: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{kind} is not JSON: {error}", param=kind) from error


def _check_grammar(grammar: str) -> None:
    _at_most("characters", len(grammar), MAX_GUIDE_CHARS, "grammar")
    if "%json" in grammar:  # a text in which numbers could be spelled in ways that cannot be counted
        raise CostlyGuide("a schema inside a grammar is not taken: give it as json_schema", param="grammar")
    total = 0
    for number, repetition in enumerate(_REPEATED.finditer(grammar), 1):
        _at_most("repeated parts", number, MAX_REPEATED, "grammar")
        count = _times(repetition)
        _at_most("repetitions of one part", count, MAX_ITEMS, "grammar")
        total += count
    _at_most("repetitions together", total, MAX_REPETITIONS, "grammar")


def _check_schema(schema: Any, kind: str) -> None:
    chars = repetitions = pattern_chars = multiples = 0
    definitions: set[str] = set()
    for value, is_data in _values(schema, kind):
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            chars += sum(map(len, value))
            if not is_data:
                for pattern in _patterns(value):
                    pattern_chars += len(pattern)
                    _at_most("characters in patterns", pattern_chars, MAX_PATTERN_CHARS, kind)
                    repetitions += _check_positions(pattern, kind)
                for name in _COUNTED & value.keys():
                    repetitions += _check_count(name, value[name], kind)
                if "multipleOf" in value:
                    multiples += 1
                    _at_most("numbers of 'multipleOf'", multiples, MAX_MULTIPLES, kind)
                if isinstance(reference := value.get("$ref"), str):
                    definitions.add(reference)
    _at_most("characters", chars, MAX_GUIDE_CHARS, kind)
    _at_most("repetitions together", repetitions, MAX_REPETITIONS, kind)
    _at_most("definitions that it refers to", len(definitions), MAX_DEFINITIONS, kind)
    _Combinations(schema, kind).check()


def _values(schema: Any, kind: str) -> Iterator[tuple[Any, bool]]:
    """Yield every value, and whether it is data. Raises InvalidRequest for too many, or one that lies too deep."""
    pending: list[_Path] = [(schema, 1, False)]
    values = 1
    while pending:
        value, depth, is_data = pending.pop()
        if isinstance(value, dict | list | tuple):
            values += len(value)
            if values > MAX_VALUES or depth > MAX_DEPTH:
                _at_most("values", values, MAX_VALUES, kind)
                _at_most("levels", depth, MAX_DEPTH, kind)
            if isinstance(value, dict):
                pending += [(inner, depth + 1, is_data or name in _DATA) for name, inner in value.items()]
            else:
                pending += [(inner, depth + 1, is_data) for inner in value]
        yield value, is_data


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from named


def _check_count(name: str, count: object, kind: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int | float):
        return 0  # of a property that is called so
    if name == "multipleOf":
        _check_multiple(count, kind)
        return 0
    most = MAX_ITEMS if name in _ITEMS else MAX_LENGTH
    if not 0 <= count <= most or count != int(count):
        shown = count if count < 10**18 else "10^18 or more"
        raise CostlyGuide(f"'{name}' in {kind} must be an integer from 0 to {most}, got {shown}", param=kind)
    return int(count)


def _check_multiple(step: float, kind: str) -> None:
    if not 0 < step < 10**18 or Fraction(str(step)).numerator > MAX_MULTIPLE:
        raise CostlyGuide(
            f"'multipleOf' in {kind} must be above 0 and, without its decimal point, at most {MAX_MULTIPLE}", param=kind
        )


def _times(repetition: re.Match[str]) -> int:
    """Return how often `{3}`, `{3,}` or `{3,5}` repeats at least, or at most if that is bounded."""
    return max((int(digits[:18]) for digits in (repetition[1], repetition[3]) if digits), default=1)


def _check_positions(pattern: str, kind: str) -> int:
    """Return how many characters a pattern has once its repetitions are written out. Raises InvalidRequest for too many."""
    groups, last = [0], 0
    for atom in _ATOM.finditer(pattern):
        match atom[0]:
            case "(":
                groups.append(0)
                last = 0
            case ")":
                last = groups.pop()
                groups = groups or [0]
                groups[-1] += last
            case "|" | "*" | "+" | "?":
                pass
            case text if text[0] == "{" and len(text) > 1 and (atom[1] or atom[3]):
                more = last * (_times(atom) - 1)
                groups[-1] += max(0, more)
                last += max(0, more)
            case _:
                last = 1
                groups[-1] += 1
        _at_most("characters in one pattern with its repetitions written out", groups[-1], MAX_PATTERN_POSITIONS, kind)
    return sum(groups)


class _Combinations:
    """Counts the plain schemas that a schema becomes when what it combines is multiplied out."""

    def __init__(self, root: Any, kind: str) -> None:
        self._root = root
        self._kind = kind
        self._counts: dict[int, int] = {}
        """By the identity of the schema; 1 while it is counted, as for one that contains itself."""

    def check(self) -> None:
        for value, is_data in _values(self._root, self._kind):
            if not is_data and isinstance(value, dict) and ("allOf" in value or "$ref" in value):
                self._of(value, 0)

    def _of(self, schema: Any, level: int) -> int:
        if not isinstance(schema, dict):
            return 1
        if (counted := self._counts.get(id(schema))) is not None:
            return counted
        _at_most("levels of references, allOf and anyOf", level, _MAX_LEVELS, self._kind)
        self._counts[id(schema)] = count = 1
        if "$ref" in schema:
            count *= self._of(self._referenced(schema["$ref"]), level + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(name), list) and alternatives:
                count *= sum(self._of(alternative, level + 1) for alternative in alternatives)
        if isinstance(parts := schema.get("allOf"), list):
            product, total = 1, 0
            for part in parts:
                combinations = self._of(part, level + 1)
                product, total = min(product * combinations, 10**18), total + combinations
            count *= max(product, total, 1)
        _at_most("combinations of allOf, anyOf and references", count, MAX_COMBINATIONS, self._kind)
        self._counts[id(schema)] = count
        return count

    def _referenced(self, path: object) -> Any:
        """Return what a reference inside of the schema means; None for any other, which is the engine's to refuse."""
        target: Any = self._root
        if not isinstance(path, str) or not path.startswith("#"):
            return None
        for name in path.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        return target
