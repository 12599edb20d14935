"""Fields of a body that are changed on the way."""

from __future__ import annotations

import json

import pytest

from dynamo.frontend.api.http.body_fields import changed_body, model_in


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


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"far"', b'{"model": 1}', b'{"model": "\xff"}', b"[" * 100_000])
def test_what_is_no_request_names_no_model_and_is_not_changed(body: bytes) -> None:
    assert model_in(body) == "" and changed_body(body, model="served") is None
