"""What structured output may cost: no text that is short to write may be long to check, or reach an engine that multiplies it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.guided_rules import MAX_VALUES, check_guided
from tests.support.shapes import EXPENSIVE, LEGAL, doubling

_CALLS_PER_VALUE = 15


@pytest.mark.parametrize(("name", "bound"), [(name, bound) for name, (_, bound) in EXPENSIVE.items()])
def test_what_no_engine_should_compile_is_refused_with_its_bound(name: str, bound: str) -> None:
    guided, _ = EXPENSIVE[name]
    with pytest.raises(InvalidRequest, match=bound):
        check_guided(guided)


@pytest.mark.parametrize("guided", LEGAL, ids=lambda guided: str(guided)[:60])
def test_what_applications_send_is_taken(guided: dict[str, Any]) -> None:
    check_guided(guided)


def test_words_of_a_schema_are_data_where_they_name_no_rule() -> None:
    check_guided({"json_schema": {"enum": [{"minItems": 10**9}]}})
    check_guided({"json_schema": {"properties": {"minItems": {"type": "integer"}, "multipleOf": True}}})


def test_a_schema_in_a_string_is_checked_as_one_that_is_not() -> None:
    with pytest.raises(InvalidRequest, match="from 0 to"):
        check_guided({"json_schema": json.dumps({"minItems": 10**9})})


def calls_to_check(guided: dict[str, Any]) -> int:
    """Return how many functions ran to check `guided`, which is work that no busy machine changes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        check_guided(guided)
    except InvalidRequest:
        pass
    finally:
        sys.setprofile(before)
    return calls


NAMES = st.sampled_from(["a", "b", "c"])
REFERENCES = NAMES.map(lambda name: {"$ref": f"#/$defs/{name}"})
COUNTS = st.integers(0, 10**12)
LEAVES = (
    REFERENCES
    | st.builds(lambda count: {"type": "array", "minItems": count}, COUNTS)
    | st.builds(lambda count: {"type": "string", "maxLength": count}, COUNTS)
    | st.builds(lambda text: {"type": "string", "pattern": text}, st.text("(a|b){12,}*[]\\", max_size=40))
    | st.just({"type": "null"})
    | st.integers()
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(
            lambda name, parts: {name: parts},
            st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"]),
            st.lists(inner, max_size=4),
        )
        | st.builds(lambda part: {"type": "array", "items": part}, inner)
    ),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        lambda root, named: {**(root if isinstance(root, dict) else {}), "$defs": named}, SCHEMAS, st.dictionaries(NAMES, SCHEMAS)
    )
)
@example(doubling(90, "allOf"))
@example(doubling(90, "anyOf"))
@example(doubling(90, "properties"))
def test_no_schema_takes_more_work_than_its_values(schema: dict[str, Any]) -> None:
    values = len(json.dumps(schema))
    assert calls_to_check({"json_schema": schema}) <= _CALLS_PER_VALUE * values


def test_a_schema_of_any_size_takes_bounded_work() -> None:
    assert calls_to_check({"json_schema": {"anyOf": [{"const": 1}] * 1_000_000}}) <= _CALLS_PER_VALUE * MAX_VALUES


@settings(max_examples=300, deadline=None)
@given(st.text("(a|b){129,}*[]\\?+^-", max_size=200))
def test_no_pattern_takes_more_work_than_its_characters(pattern: str) -> None:
    assert calls_to_check({"regex": pattern}) <= _CALLS_PER_VALUE * (len(pattern) + 1)


@pytest.mark.parametrize("run", [" ", "1"], ids=["spaces", "digits"])
@pytest.mark.parametrize(
    "guided",
    [
        lambda text: {"grammar": 'root ::= "a"' + text},
        lambda text: {"regex": "a" + text},
        lambda text: {"json_schema": {"pattern": "a" + text}},
    ],
    ids=["grammar", "regex", "schema"],
)
def test_a_repetition_that_is_never_closed_is_read_once(guided: Callable[[str], dict[str, Any]], run: str) -> None:
    """Were its parts tried in all ways, this would take days."""
    check_guided(guided("{" + run * 9000))
