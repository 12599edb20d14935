"""Bodies that are relayed: the name of the model in them is read, and replaced by the one that the model's server knows."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Final, Protocol

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.body_fields import cache_salt_in, check_fields, rewritten_body, values_in
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.http.multipart import FormPart, form_parts
from dynamo.frontend.api.openai.media.relayed_rights import check_guides, check_rights, check_template, sequences_in
from dynamo.frontend.security.accounts import Account

_MAX_NAME_BYTES = 1024
_PIECE_BYTES: Final = 1 << 20
_MODEL: Final = "model"
_SALT: Final = "cache_salt"
_READ_BYTES: Final = 1024
"""What is read of a field of a form at most."""
_SPECIAL: Final = re.compile(r'[\x00-\x1f"\\\x7f]')


class RelayedBody(Protocol):
    @property
    def model(self) -> str | None:
        """The model that it names."""
        ...

    @property
    def content_type(self) -> str: ...

    def permit(self, account: Account, most: int, *, templates: bool = False) -> int:
        """Return how many results it asks for, `most` at most. Raises InvalidRequest for what this caller may not say.

        `templates`: whether requests may bring a chat template.
        """
        ...

    def naming(self, model: str) -> bytes:
        """Return the body as a server gets it that has this name for the model."""
        ...


class _NamedBody(msgspec.Struct):
    model: str | None = None


_fields = msgspec.json.Decoder(_NamedBody)


class JsonBody:
    """A JSON object. The other fields keep their text; of one that is given twice, the last is meant."""

    content_type = "application/json"

    def __init__(self, body: bytes, max_depth: int) -> None:
        """Raises InvalidRequest for a body that is none, PayloadTooLarge for one of too many fields."""
        self._body = body
        self._changes: dict[str, str] = {}
        self.model = decode(_fields, body, max_depth).model
        check_fields(body)

    def permit(self, account: Account, most: int, *, templates: bool = False) -> int:
        body = self._body
        values = values_in(body)
        if values is None:
            raise InvalidRequest("the body is not a JSON object in UTF-8")
        check_rights(values, account)
        if not templates:
            check_template(values)
        check_guides(body, values, account)
        if _SALT in values:
            self._changes[_SALT] = account.isolate(cache_salt_in(body))
        return sequences_in(values, most)

    def naming(self, model: str) -> bytes:
        return rewritten_body(self._body, model=model, **self._changes)


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

    def permit(self, account: Account, most: int, *, templates: bool = False) -> int:
        values = {part.name: msgspec.Raw(part.body[part.begin : min(part.end, part.begin + _READ_BYTES)]) for part in self._parts}
        check_rights(values, account)
        return sequences_in(values, most)

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
