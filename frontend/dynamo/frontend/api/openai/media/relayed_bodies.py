"""Bodies that are relayed: the name of the model in them is read, and replaced by the one that the model's server knows."""

from __future__ import annotations

from typing import Protocol

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.body_fields import changed_body
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.http.multipart import FormPart, parse_form

_MAX_NAME_BYTES = 1024


class RelayedBody(Protocol):
    @property
    def model(self) -> str | None:
        """The model that it names."""
        ...

    @property
    def content_type(self) -> str: ...

    def naming(self, model: str) -> bytes:
        """Return the body as a server gets it that has this name for the model."""
        ...


class _NamedBody(msgspec.Struct):
    model: str | None = None


_fields = msgspec.json.Decoder(_NamedBody)


class JsonBody:
    """A JSON object. The other fields keep their text, and are not looked into."""

    content_type = "application/json"

    def __init__(self, body: bytes, max_depth: int) -> None:
        """Raises InvalidRequest for a body that is none."""
        self._body = body
        self.model = decode(_fields, body, max_depth).model

    def naming(self, model: str) -> bytes:
        return changed_body(self._body, model=model) or self._body


class FormBody:
    """A form of the type multipart/form-data."""

    def __init__(self, body: bytes, content_type: str) -> None:
        """Raises InvalidRequest for a body that is none."""
        self.content_type = content_type
        self._body = body
        self._part: FormPart | None = parse_form(content_type, body).get("model")
        self.model: str | None = None if self._part is None else _name(self._part)

    def naming(self, model: str) -> bytes:
        part, body = self._part, self._body
        if part is None or self.model == model:
            return body
        return b"".join((body[: part.begin], model.encode(), body[part.end :]))


def _name(part: FormPart) -> str:
    if part.end - part.begin > _MAX_NAME_BYTES:
        raise InvalidRequest(f"'model' has more than {_MAX_NAME_BYTES} bytes", param="model")
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("'model' is not in UTF-8", param="model") from None
