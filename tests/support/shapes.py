"""Structured output that is short to write and long to compile, for tests of every place that gets it."""

from __future__ import annotations

from typing import Any


def doubling(levels: int, keyword: str) -> dict[str, Any]:
    """A schema whose definitions name the next one twice each."""

    def twice(name: str) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/{name}"}
        if keyword == "properties":
            return {"type": "object", "properties": {"a": reference, "b": reference}, "required": ["a", "b"]}
        return {keyword: [reference, reference]}

    definitions = {f"d{level}": twice(f"d{level + 1}") for level in range(levels)}
    return {"$defs": {**definitions, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(levels: int, **keywords: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, **keywords}
    return schema


PRODUCT: dict[str, Any] = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{part}{number}": {"type": "string"}}} for number in range(4)]}
        for part in range(14)
    ]
}
EXPENSIVE: dict[str, tuple[dict[str, Any], str]] = {
    "minItems": ({"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}}, "'minItems' .* to 10000"),
    "maxItems": ({"json_schema": {"type": "array", "items": {"type": "string"}, "maxItems": 10**9}}, "'maxItems' .* to 10000"),
    "minLength": ({"json_schema": {"type": "string", "minLength": 10**9}}, "'minLength' .* to 100000"),
    "minProperties": ({"json_schema": {"type": "object", "minProperties": 10**9}}, "'minProperties' .* to 10000"),
    "a negative count": ({"json_schema": {"type": "array", "minItems": -1}}, "from 0 to 10000, got -1"),
    "half a count": ({"json_schema": {"type": "array", "minItems": 1.5}}, "from 0 to 10000, got 1.5"),
    "counts together": (
        {"json_schema": {"prefixItems": [{"type": "string", "maxLength": 100_000}] * 11}},
        "1100000 repetitions together; at most 1000000",
    ),
    "a pattern in a schema": (
        {"json_schema": {"type": "string", "pattern": "((a{1000}){1000}){1000}"}},
        "repetitions written out; at most 10000",
    ),
    "a name in patternProperties": (
        {"json_schema": {"patternProperties": {"(a{1000}){1000}": {}}}},
        "repetitions written out; at most 10000",
    ),
    "a regex": ({"regex": "((a{1000}){1000}){1000}"}, "repetitions written out; at most 10000"),
    "a regex of groups": ({"regex": "([a-z]|\\d{1000}){2,50}"}, "repetitions written out; at most 10000"),
    "a long regex": ({"regex": "(a|aa)+$" * 5000}, "characters; at most 32768"),
    "a multiple": ({"json_schema": {"type": "integer", "multipleOf": 1_000_003}}, "'multipleOf' .* at most 100000"),
    "multiples": ({"json_schema": {"anyOf": [{"multipleOf": 3}] * 1001}}, "numbers of 'multipleOf'; at most 1000"),
    "repeated parts of a grammar": ({"grammar": "{1}" * 10_001}, "10001 repeated parts; at most 10000"),
    "no multiple": ({"json_schema": {"type": "integer", "multipleOf": 0}}, "'multipleOf' .* above 0"),
    "constants": ({"json_schema": {"anyOf": [{"const": number} for number in range(50_000)]}}, "values; at most 20000"),
    "an enumeration": ({"json_schema": {"enum": list(range(10**6))}}, "values; at most 20000"),
    "a long enumeration": ({"json_schema": {"enum": ["x" * 1000] * 300}}, "characters; at most 262144"),
    "depth": ({"json_schema": nested(101)}, "levels; at most 100"),
    "definitions": ({"json_schema": doubling(300, "properties")}, "definitions that it refers to; at most 256"),
    "allOf that doubles": ({"json_schema": doubling(40, "allOf")}, "combinations .* at most 10000"),
    "a product of anyOf": ({"json_schema": PRODUCT}, "combinations .* at most 10000"),
    "choices": ({"choice": ["a"] * 1025}, "1025 choices; at most 1024"),
    "long choices": ({"choice": ["x" * 1000] * 1000}, "1000000 characters; at most 262144"),
    "a grammar": ({"grammar": 'root ::= "a"{1000000000}'}, "1000000000 repetitions of one part; at most 10000"),
    "a long grammar": ({"grammar": "root ::= root root\n" * 20_000}, "characters; at most 262144"),
    "a schema in a grammar": ({"grammar": '%llguidance {}\nstart: %json {"minItems": 1}'}, "give it as json_schema"),
    "a structural tag": ({"structural_tag": '{"format": {"minItems": 1000000000}}'}, "'minItems' .* to 10000"),
}
"""Structured output by what makes it expensive, each with a pattern for the words of its refusal."""

LEGAL: list[dict[str, Any]] = [
    {"json_object": True},
    {"json_schema": True},
    {"json_schema": {"type": "array", "minItems": 3, "maxItems": 1000, "items": {"type": "string", "maxLength": 65_536}}},
    {"json_schema": {"type": "number", "multipleOf": 0.01}},
    {"json_schema": {"type": "integer", "multipleOf": 1000.0, "minItems": 2.0}},
    {"json_schema": {"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}}}, "$ref": "#/$defs/tree"}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": doubling(30, "properties")},
    {"json_schema": nested(5, minItems=1000)},
    {"json_schema": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}T[0-9:.]{8,15}(Z|[+-]\d{2}:\d{2})$"}},
    {"json_schema": {"enum": [f"value-{number}" for number in range(5000)]}},
    {"regex": r"[^\]{}()]{1,4000}\{2\}"},
    {"choice": [f"choice {number}" for number in range(1024)]},
    {"grammar": 'root ::= [0-9]{1,20} other{3}\nother ::= "x"{,5}'},
]
"""Structured output as applications send it; some of it has no end, which is theirs to bound by `max_tokens`."""
