"""The name of the model in bodies that are relayed."""

from __future__ import annotations

import json

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.openai.media.relayed_bodies import FormBody, JsonBody
from tests.support.every_operation import form

KIND = "multipart/form-data; boundary=b"


def test_a_form_keeps_all_but_the_name_of_the_model() -> None:
    file = bytes(range(256)) * 10
    body = FormBody(form("whisper", file), KIND)
    assert (body.model, body.content_type) == ("whisper", KIND)
    assert body.naming("/models/é") == form("/models/é", file)
    assert body.naming("whisper") == form("whisper", file)


def test_a_form_without_a_model_is_left_as_it_is() -> None:
    body = FormBody(form("", b"x"), KIND)
    assert body.model is None and body.naming("m") == form("", b"x")


def test_json_keeps_all_but_the_name_of_the_model() -> None:
    body = JsonBody(b'{"a": 1.50, "model": "m", "b": {"model": "m"}}', 100)
    assert body.model == "m" and json.loads(body.naming("n")) == {"a": 1.5, "model": "n", "b": {"model": "m"}}
    assert b"1.50" in body.naming("n") and body.naming("m") == b'{"a": 1.50, "model": "m", "b": {"model": "m"}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"m" * 2000, "more than 1024 bytes"), (b"\xff", "not in UTF-8")],
)
def test_a_name_that_is_none_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FormBody(form("MODEL", b"").replace(b"MODEL", content), KIND)


@pytest.mark.parametrize(("body", "message"), [(b"[1]", "object"), (b'{"model": 3}', "model"), (b"{", "JSON")])
def test_what_is_no_object_with_a_name_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        JsonBody(body, 100)
