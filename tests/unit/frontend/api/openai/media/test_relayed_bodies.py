"""The name of the model in bodies that are relayed."""

from __future__ import annotations

import json

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.multipart import form_parts
from dynamo.frontend.api.openai.media.relayed_bodies import FormBody, JsonBody
from tests.support.every_operation import form

KIND = "multipart/form-data; boundary=b"


def fields(body: FormBody, model: str) -> list[tuple[str, str, bytes]]:
    return [(part.name, part.filename, part.content) for part in form_parts(body.content_type, body.naming(model))]


def test_a_form_keeps_all_but_the_name_of_the_model() -> None:
    file = bytes(range(256)) * 10 + b"\r\n--b--"
    body = FormBody(form("whisper", file), KIND)
    assert body.model == "whisper"
    assert fields(body, "/models/é") == [("model", "", "/models/é".encode()), ("file", "f", file[:-7])]


def test_a_form_without_a_model_gets_the_name_of_the_only_one() -> None:
    body = FormBody(form("", b"x"), KIND)
    assert body.model is None and fields(body, "m")[0] == ("model", "", b"m")


def test_a_form_names_one_model_however_a_server_reads_forms() -> None:
    """A server may take the last of several fields, the first of a header given twice, and lines that end with a line feed."""
    named = form("whisper", b"x")
    with pytest.raises(InvalidRequest, match="several fields 'model'"):
        FormBody(named.replace(b"--b--", b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n--b--'), KIND)
    hidden = b'x\n--b\nContent-Disposition: form-data; name="model"\n\nother\n'
    twice = b'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'
    quoted = b'Content-Disposition: form-data; name="a\\"; name="model"\r\nContent-Type: a/b;\r\n c\r\n\r\nother\r\n'
    body = FormBody(form("whisper", hidden).replace(b"--b--", b"--b\r\n" + twice + b"--b\r\n" + quoted + b"--b--"), KIND)
    sent = body.naming("whisper")
    assert sent.count(b'name="model"\r\n') == 1 and [each[0] for each in fields(body, "m")].count("model") == 1
    assert body.content_type.encode()[-32:] not in hidden and b"Content-Type: a/b; c\r\n" in sent
    assert body.content_type != FormBody(form("whisper", b"x"), KIND).content_type


def test_json_keeps_all_but_the_name_of_the_model() -> None:
    body = JsonBody(b'{"a": 1.50, "model": "m", "b": {"model": "m"}}', 100)
    assert body.model == "m" and json.loads(body.naming("n")) == {"a": 1.5, "model": "n", "b": {"model": "m"}}
    assert b"1.50" in body.naming("n")


def test_json_names_one_model_though_it_was_given_several() -> None:
    body = JsonBody(b'{"model": "other", "model": "m", "n": 1}', 100)
    assert body.model == "m" and body.naming("m") == b'{"model":"m","n":1}'


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
