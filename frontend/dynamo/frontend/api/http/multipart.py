"""Bodies of the type multipart/form-data, as clients upload files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from dynamo.common.errors import InvalidRequest

_MAX_PARTS = 32
_MAX_HEADER_BYTES = 2 * 1024
_MAX_PARAMETERS = 32
"""The parser of `email` takes time by the square of their number."""
_WINDOW_BYTES = 1 << 20
"""Bytes that are searched before another thread may have its turn: one search keeps the interpreter to itself."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field of a form."""

    name: str
    filename: str
    """Empty for a field that is no file."""
    body: bytes
    """The whole form."""
    begin: int
    """Where the content begins in the form."""
    end: int
    content_type: str = ""

    @property
    def content(self) -> bytes:
        """A copy of the content."""
        return self.body[self.begin : self.end]


def parse_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields of a form by name, the first of each. Raises InvalidRequest."""
    parts: dict[str, FormPart] = {}
    for part in form_parts(content_type, body):
        parts.setdefault(part.name, part)
    return parts


def form_parts(content_type: str, body: bytes) -> list[FormPart]:
    """Return all fields of a form, in its order. Raises InvalidRequest."""
    header = Message()
    header["content-type"] = content_type[:_MAX_HEADER_BYTES]
    boundary = _parameter(header, "content-type", "boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not 1 <= len(boundary) <= 70:
        raise InvalidRequest(f"the content type is {content_type[:80]!r}; it must be 'multipart/form-data' with a boundary")
    return [*_parts(body, b"--" + boundary.encode("latin-1", "replace"))]


def _parts(body: bytes, delimiter: bytes) -> Iterator[FormPart]:
    position = _find(body, delimiter, 0)
    for _ in range(_MAX_PARTS):
        start = position + len(delimiter)
        if position < 0 or body[start : start + 2] == b"--":
            break
        end = _find(body, b"\r\n" + delimiter, start)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_HEADER_BYTES)
        if body[start : start + 2] != b"\r\n" or head_end < 0 or end < head_end:
            raise InvalidRequest("the body is not a complete multipart/form-data form")
        head = HeaderParser().parsestr(body[start + 2 : head_end + 4].decode(errors="replace"))
        name, filename = (_parameter(head, "content-disposition", key) for key in ("name", "filename"))
        if not isinstance(name, str):
            raise InvalidRequest("a part of the form has no name")
        kind = " ".join(head.get("content-type", "").split())
        yield FormPart(name, "" if filename is None else _decoded(filename), body, head_end + 4, end, kind)
        position = end + 2
    else:
        raise InvalidRequest(f"the form has more than {_MAX_PARTS} parts")


def _find(body: bytes, sought: bytes, start: int) -> int:
    """Do what `body.find` does, a window at a time."""
    for begin in range(start, len(body), _WINDOW_BYTES):
        position = body.find(sought, begin, begin + _WINDOW_BYTES + len(sought) - 1)
        if position >= 0:
            return position
    return -1


def _decoded(filename: str | tuple[str | None, str | None, str]) -> str:
    """Return the name of a file that may be percent-encoded, with its character set. Raises InvalidRequest.

    Text in some other sets, such as UTF-7, decodes to lone surrogates, which cannot be stored.
    """
    try:
        if isinstance(filename, str):
            return filename.encode().decode()
        charset, _, text = filename
        if (charset or "utf-8").lower() in ("utf-8", "us-ascii"):
            return text.encode("latin-1").decode()
    except UnicodeError:
        pass
    raise InvalidRequest("the name of the file must be in UTF-8", param="file")


def _parameter(message: Message, header: str, name: str) -> str | tuple[str | None, str | None, str] | None:
    """Return a parameter of a header, as `Message.get_param` does. Raises InvalidRequest."""
    if message.get(header, "").count(";") > _MAX_PARAMETERS:
        raise InvalidRequest(f"{header} has more than {_MAX_PARAMETERS} parameters")
    try:
        return message.get_param(name, header=header)
    except (TypeError, ValueError) as error:  # of parameters in numbered pieces, of which some have no number or a long one
        raise InvalidRequest(f"{header} has malformed parameters") from error
