"""Fields of a body that are changed on the way."""

from __future__ import annotations

import json

import pytest

from dynamo.common.errors import PayloadTooLarge
from dynamo.frontend.api.http.body_fields import cache_salt_in, changed_body, check_fields, model_in


def test_only_the_named_fields_change_and_the_rest_keeps_its_text() -> None:
    body = (
        b'{"a": 1.50, "model":"far", "messages": [{"content": "\\u00e9 \\"model\\": \\"x\\""}], "big": 12345678901234567890123}'
    )
    changed = changed_body(body, model="served", cache_salt="salt")
    assert changed is not None and b"1.50" in changed and b"12345678901234567890123" in changed and b"\\u00e9" in changed
    assert json.loads(changed) == {**json.loads(body), "model": "served", "cache_salt": "salt"}


def test_a_body_that_has_the_fields_stays_as_it_is() -> None:
    assert changed_body(b'{"model": "served", "cache_salt": "s"}', model="served", cache_salt="s") is None
    assert changed_body(b'{"model": "served"}', model="served") is None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"far"', b"[" * 100_000])
def test_what_is_no_request_names_no_model_and_is_not_changed(body: bytes) -> None:
    assert model_in(body) == "" and changed_body(body, model="served") is None


@pytest.mark.parametrize("value", [b"1", b'"\xff"', b'["another"]', b"null"])
def test_a_field_that_is_no_text_names_nothing_and_is_replaced(value: bytes) -> None:
    body = b'{"model": %b, "cache_salt": %b}' % (value, value)
    assert model_in(body) == cache_salt_in(body) == ""
    assert changed_body(body, model="served", cache_salt="s") == b'{"model":"served","cache_salt":"s"}'


def test_only_fields_of_the_body_itself_count() -> None:
    many = json.dumps({f"f{number}": 1 for number in range(10_001)}).encode()
    with pytest.raises(PayloadTooLarge, match="10000 fields"):
        check_fields(many)
    check_fields(b'{"messages": [%b], "tools": [%b]}' % (many, many))
    check_fields(many[:-1])  # no JSON
    check_fields(b":" * 100_000)
