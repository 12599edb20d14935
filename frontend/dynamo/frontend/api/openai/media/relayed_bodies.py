"""Bodies that are relayed: the name of the model in them is read, and replaced by the one that the model's server knows."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Final, Protocol

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.body_fields import check_fields, rewritten_body
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.http.multipart import FormPart, form_parts

_MAX_NAME_BYTES = 1024
_PIECE_BYTES: Final = 1 << 20
_MODEL: Final = "model"
_SPECIAL: Final = re.compile(r'[\x00-\x1f"\\\x7f]')


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
    """A JSON object. The other fields keep their text, and are not looked into; of one that is given twice, the last is meant."""

    content_type = "application/json"

    def __init__(self, body: bytes, max_depth: int) -> None:
        """Raises InvalidRequest for a body that is none, PayloadTooLarge for one of too many fields."""
        self._body = body
        self.model = decode(_fields, body, max_depth).model
        check_fields(body)

    def naming(self, model: str) -> bytes:
        return rewritten_body(self._body, model=model)


class FormBody:
    """A form of the type multipart/form-data.

    It is written anew, with a boundary that its files cannot know: a server reads no other fields, and no other model, than are
    read here, however it reads forms.
    """

    def __init__(self, body: bytes, content_type: str) -> None:
        """Raises InvalidRequest for a body that is none."""
        self._parts = form_parts(content_type, body)
        named = [part for part in self._parts if part.name == _MODEL]
        if len(named) > 1:
            raise InvalidRequest("the form has several fields 'model'", param=_MODEL)
        self.model: str | None = _name(named[0]) if named else None
        boundary = token_hex(16)
        self._delimiter = f"--{boundary}".encode()
        self.content_type = f"multipart/form-data; boundary={boundary}"

    def naming(self, model: str) -> bytes:
        pieces = [self._delimiter, _head(_MODEL), model.encode()]
        for part in self._parts:
            if part.name != _MODEL:
                pieces += (b"\r\n", self._delimiter, _head(part.name, part.filename, part.content_type))
                # Joining bytes, and no views, leaves the interpreter to other threads; cutting a long piece would not.
                cuts = range(part.begin, part.end, _PIECE_BYTES)
                pieces += (part.body[begin : min(begin + _PIECE_BYTES, part.end)] for begin in cuts)
        return b"".join((*pieces, b"\r\n", self._delimiter, b"--\r\n"))


def _head(name: str, filename: str = "", kind: str = "") -> bytes:
    head = f'\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
    if filename:
        head += f'; filename="{_quoted(filename)}"'
    if kind and kind.isascii() and kind.isprintable():
        head += f"\r\nContent-Type: {kind}"
    return f"{head}\r\n\r\n".encode(errors="replace")


def _quoted(value: str) -> str:
    """Return a value between quotes, in which browsers write what would end it so."""
    return _SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", value)


def _name(part: FormPart) -> str:
    if part.end - part.begin > _MAX_NAME_BYTES:
        raise InvalidRequest(f"'model' has more than {_MAX_NAME_BYTES} bytes", param="model")
    try:
        return part.content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("'model' is not in UTF-8", param="model") from None
