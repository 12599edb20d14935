"""Bounds of JSON bodies, which are checked before anything is built."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.json_scan import NODE_VALUES, STRING_VALUES, check_json, scan_json
from tests.support.waiting import counting_turns

BLOCK_BYTES = 64 * 1024
PLENTY = 10**12
TEXTS = st.text(st.sampled_from('[]{},:"\\\n a\u00e9'), max_size=8)
DOCUMENTS = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.none(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def values_of(value: Any) -> int:
    """The number of values, as they count: commas, and more for each container, key and string."""
    if isinstance(value, str):
        return STRING_VALUES - 1
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    keys = len(value) if isinstance(value, dict) else 0
    return max(0, len(value) - 1) + NODE_VALUES * (1 + keys) + sum(map(values_of, inner))


def is_accepted(body: bytes, max_depth: int, max_values: int) -> bool:
    """Return whether a body is within the bounds, counted in either way: at once if that is possible, and in blocks."""
    at_once, in_blocks = (_is_accepted(text, max_depth, max_values) for text in (body, memoryview(body)))
    assert at_once is in_blocks
    return at_once


def _is_accepted(text: bytes | memoryview, max_depth: int, max_values: int) -> bool:
    try:
        check_json(text, max_depth=max_depth, max_values=max_values)
    except InvalidRequest:
        return False
    return True


@given(DOCUMENTS, st.integers(0, 40), st.booleans())
def test_depth_and_values_are_counted_outside_of_strings_across_blocks(document: Any, offset: int, ascii_only: bool) -> None:
    # The longer text makes the whole one that is looked at in blocks, with a boundary somewhere in the document.
    filling = '"' + "[{:,\\\\" * 2 + "x" * (BLOCK_BYTES - 16 - offset) + '"'
    body = f"[{filling},{json.dumps(document, ensure_ascii=ascii_only)}]".encode()
    depth, values = 1 + depth_of(document), NODE_VALUES + STRING_VALUES + values_of(document)
    assert is_accepted(body, depth, values)
    assert not is_accepted(body, depth - 1, values)
    assert not is_accepted(body, depth, values - 1)


@pytest.mark.parametrize("backslashes", range(6))
@pytest.mark.parametrize("offset", range(4))
def test_an_escape_may_lie_across_two_blocks(backslashes: int, offset: int) -> None:
    text = "x" * (BLOCK_BYTES - 3 - offset) + "\\" * backslashes + '"' + "[[[["
    body = json.dumps([text, [[]]]).encode()
    assert is_accepted(body, 3, PLENTY)
    assert not is_accepted(body, 2, PLENTY)


@pytest.mark.parametrize("body", [b"", b'"', b"\\", b'["\\', b"]]]]", b"}{", b"\xff\xfe" * 40_000, b'"\\' * 40_000])
def test_what_is_not_json_is_left_to_the_decoder(body: bytes) -> None:
    check_json(body, max_depth=100_000, max_values=PLENTY)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"1,", b'"",', b'{"a":1},', b"[[[[[[[[]]]]]]]],"])
def test_a_body_of_many_values_is_rejected_before_it_is_built(piece: bytes) -> None:
    body = b"[" + piece * (32 * 2**20 // len(piece)) + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="too many values"):
            check_json(body, max_depth=100, max_values=1_000_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 2**20


@pytest.mark.parametrize("number", [b"1e308", b"1E+308", b"17976931348623157e-0320", b"-1.5e100"])
@pytest.mark.parametrize("size", [30_000, 2 * 2**20])
def test_numbers_that_take_a_decoder_long_count_more(number: bytes, size: int) -> None:
    count = size // (len(number) + 1)
    values = NODE_VALUES + count - 1 + (256 + number.count(b".")) * count
    body = b"[" + number + (b"," + number) * (count - 1) + b"]"
    margin = 256 * (size // BLOCK_BYTES + 1)  # one may lie across two blocks, and is not seen then
    assert is_accepted(body, 1, values)
    assert not is_accepted(body, 1, values - margin - 1)
    harmless = body.replace(b"e", b"1").replace(b"E+", b"1").replace(b"E", b"1").replace(b"1-0320", b"0320")
    assert is_accepted(harmless, 1, NODE_VALUES + count - 1 + number.count(b".") * count)


@pytest.mark.parametrize("number", [b"1" + b"0" * 308, b"0." + b"0" * 300 + b"12345678901234567890", b"9" * 40 + b".5"])
def test_numbers_of_many_digits_count_more(number: bytes) -> None:
    body = b"[" + b",".join([number] * (2 * 2**20 // len(number))) + b"]"
    assert not is_accepted(body, 1, 100_000)
    assert is_accepted(body.replace(number, b'"' + number + b'"'), 1, 400_000)
    assert is_accepted(body.replace(number, b"0.00012345678901234567"), 1, 110_000)


async def test_a_body_with_one_long_text_is_counted_without_steps() -> None:
    body = json.dumps({"prompt": 'f(a, {"b": [1]})\n\\"' * 30_000, "stop": ["\\", '"']}).encode()
    scan = scan_json(body, max_depth=2, max_values=100)
    with pytest.raises(StopIteration) as end:
        scan.send(None)
    assert end.value.value == values_of({"prompt": "", "stop": ["", ""]})


async def test_other_tasks_run_while_a_long_body_is_counted() -> None:
    body = b'["' + b"[," * (8 * 2**20) + b'"]'
    async with counting_turns() as turns:
        await scan_json(body, max_depth=100, max_values=PLENTY)
    assert turns[0] >= 16
