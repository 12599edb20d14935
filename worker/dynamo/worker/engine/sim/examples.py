"""Values that match a JSON schema, always the same for the same schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from dynamo.common.errors import InvalidRequest

_MAX_DEPTH = 64
_MAX_VALUES = 10_000
_MAX_CHARS = 1 << 16
"""Characters of all strings together, at most."""
_BY_FORMAT = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "user@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def example_of(schema: Mapping[str, Any] | bool) -> Any:
    """Return the simplest value that matches `schema`: required properties only, the least numbers, the shortest arrays.

    Raises InvalidRequest for what is not a schema, and for one with patterns or of values without end.
    """
    try:
        return _Examples(schema).of(schema, 0)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a keyword with a value of another type
        raise InvalidRequest(f"the JSON schema cannot be used: {error}", param="json_schema") from error


class _Examples:
    """Makes the values of one schema and the schemas inside of it."""

    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._root = root
        self._values = 0
        self._chars = 0

    def of(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if depth > _MAX_DEPTH or self._values > _MAX_VALUES:
            raise _too_large()
        if schema is True or schema == {}:
            return None
        if not isinstance(schema, Mapping):
            raise InvalidRequest("a JSON schema must be an object or a boolean", param="json_schema")
        if "$ref" in schema:
            return self.of(self._referenced(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        for name in ("enum", "examples"):
            if isinstance(schema.get(name), list) and schema[name]:
                return schema[name][0]
        if "default" in schema:
            return schema["default"]
        if isinstance(schema.get("allOf"), list):
            return self.of(self._merged(schema, schema["allOf"]), depth + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self.of(next((choice for choice in schema[name] if not _is_null(choice)), schema[name][0]), depth + 1)
        return self._typed(schema, depth)

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        named = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "null")
        kind = next((name for name in named if name != "null"), "null") if isinstance(named, list) else named
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                first = list(schema.get("prefixItems", ()))
                more = repeat(schema.get("items", True), max(0, int(schema.get("minItems", 0)) - len(first)))
                return [self.of(item, depth + 1) for item in chain(first, more)]
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return _number(schema, is_whole=kind == "integer")
            case "boolean":
                return True
            case "null":
                return None
        raise InvalidRequest(f"a JSON schema has the unknown type {kind!r:.80}", param="json_schema")

    def _string(self, schema: Mapping[str, Any]) -> str:
        least = int(schema.get("minLength", 0))
        self._chars += least
        if self._chars > _MAX_CHARS:
            raise _too_large()
        return _string(schema, least)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        return {name: self.of(properties.get(name, True), depth + 1) for name in schema.get("required", ())}

    def _merged(self, schema: Mapping[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
        merged = {name: value for name, value in schema.items() if name != "allOf"}
        for part in parts:
            resolved = self._referenced(part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
            for name, value in resolved.items() if isinstance(resolved, Mapping) else ():
                if name == "properties":
                    merged[name] = {**merged.get(name, {}), **value}
                elif name == "required":
                    merged[name] = [*merged.get(name, ()), *value]
                else:
                    merged.setdefault(name, value)
        return merged

    def _referenced(self, path: object) -> Any:
        target: Any = self._root
        if not isinstance(path, str) or not path.startswith("#"):
            raise InvalidRequest("the simulated engine follows only references inside of a schema", param="json_schema")
        for name in path.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                raise InvalidRequest(f"the JSON schema has no {path:.200}", param="json_schema")
            target = target[name]
        return target


def _is_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        f"the simulated engine makes no value of a schema this large, or that contains itself: at most {_MAX_VALUES} values and "
        f"{_MAX_CHARS} characters",
        param="json_schema",
    )


def _string(schema: Mapping[str, Any], least: int) -> str:
    if "pattern" in schema:
        raise InvalidRequest("the simulated engine makes no strings that match a pattern", param="json_schema")
    if (formatted := _BY_FORMAT.get(schema.get("format", ""))) is not None:
        return formatted
    return "text".ljust(least, ".")[: int(schema.get("maxLength", _MAX_CHARS))]


def _number(schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    step = schema.get("multipleOf", 1)
    value = 0 if least is None else math.ceil(least / step) * step
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        value += step
    if least is None and most is not None and value > most:
        value = math.floor(most / step) * step
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        value -= step
    return int(value) if is_whole else float(value)
