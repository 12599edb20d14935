"""Header blocks: those of requests are decoded, checked and remembered, those of responses are mostly prepared.

Most calls of a client have the same headers, which after the first call are the same few bytes. So whole blocks are
remembered, as long as the client's table, on which their meaning depends, does not change.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import quote

import grpc
import hpack

from dynamo.frontend.api.rpc.http2.frames import ConnectionFailure, ErrorCode

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"

_TABLE_BYTES: Final = 4096
"""HTTP/2's default for the table of either side, which neither our settings nor our blocks change."""
_MAX_BLOCK_BYTES: Final = 1024
"""Longer blocks are not remembered."""
_MAX_REMEMBERED_BYTES: Final = 32 * 1024
"""What the remembered blocks of a connection take, which may be idle, with the headers that they stand for: a block of some bytes
may name a long entry of the table many times."""
_FIELD_BYTES: Final = 160
"""Bytes of memory that a header field takes beside its name and value."""
_MANY_UPDATES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*+[\x00-\x7f]){3}")
"""The start of a block with more updates of the table's size than the two that RFC 7541 (4.2) has a use for."""
_TIMEOUT: Final = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_IN_VALUE: Final = re.compile(rb"[\0\r\n]")
_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTION: Final = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_HIDDEN: Final = frozenset((b"te", b"content-type", b"content-length"))
"""Besides pseudo-headers and what gRPC reserves, no metadata."""


for _logger in ("hpack.hpack", "hpack.table"):
    logging.getLogger(_logger).disabled = True  # they log all headers, credentials among them


class MalformedRequest(Exception):
    """The headers of a request break a rule of HTTP/2 (RFC 9113, 8.1.1), which ends its stream. `str()` says how."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ends that reaches no handler."""

    status: grpc.StatusCode
    text: str
    http_status: int = 200
    """Other than 200: the request is not gRPC."""


@dataclass(frozen=True, slots=True, eq=False)
class CallHeaders:
    """What the headers of a request say."""

    path: bytes
    metadata: Metadata
    timeout_s: float | None = None
    encoding: str = "identity"
    """Encoding of compressed messages in the request."""
    accepts: frozenset[str] = frozenset()
    """Encodings that responses may have."""
    content_length: int | None = None
    refusal: Refusal | None = None
    size_bytes: int = 0
    """About what they take in memory."""


@dataclass(slots=True)
class PartialBlock:
    """What has come of a header block that continues in the next frame."""

    data: bytearray
    stream: int
    ends_stream: bool


class HeaderDecoder:
    """Decodes the header blocks of one connection, which have to come here all and in order."""

    __slots__ = ("_cache", "_cached_bytes", "_decoder")

    def __init__(self, max_list_bytes: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=max_list_bytes)
        self._cache: dict[bytes, CallHeaders] = {}
        self._cached_bytes = 0

    def decode(self, block: bytes) -> CallHeaders:
        """Return the headers of a request. Raises ConnectionFailure, and MalformedRequest."""
        headers = self._cache.get(block)
        if headers is None:
            before = self._table()
            headers = read_headers(self._decode(block))
            self._remember(block, headers, before)
        return headers

    def decode_trailers(self, block: bytes) -> None:
        """Take note of trailers, which mean nothing to a server. Raises ConnectionFailure, and MalformedRequest."""
        before = self._table()
        fields = self._decode(block)
        if not _is_same(before, self._table()):
            self._forget()
        for name, value in fields:
            if name.startswith(b":"):
                raise MalformedRequest("there is a pseudo-header in the trailers")
            _check_field(name, value)

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        if _MANY_UPDATES.match(block):
            raise ConnectionFailure(
                ErrorCode.COMPRESSION_ERROR, "a header block begins with over two updates of the table's size"
            )
        before = self._table()
        try:
            fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.OversizedHeaderListError as error:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        except Exception as error:  # malformed blocks make it raise IndexError and others as well
            raise ConnectionFailure(ErrorCode.COMPRESSION_ERROR, f"a header block cannot be decoded: {error}") from None
        if not _is_same(before, self._table()):
            self._forget()
        return fields

    def _table(self) -> tuple[object, int, int]:
        """Return what changes with each change of the table: its newest entry, which is compared by identity."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return entries[0] if entries else None, len(entries), table.maxsize

    def _remember(self, block: bytes, headers: CallHeaders, before: tuple[object, int, int]) -> None:
        size = len(block) + headers.size_bytes
        if len(block) > _MAX_BLOCK_BYTES or size > _MAX_REMEMBERED_BYTES or not _is_same(before, self._table()):
            return
        if self._cached_bytes + size > _MAX_REMEMBERED_BYTES:
            self._forget()
        self._cache[block] = headers
        self._cached_bytes += size

    def _forget(self) -> None:
        self._cache.clear()
        self._cached_bytes = 0


def _is_same(before: tuple[object, int, int], after: tuple[object, int, int]) -> bool:
    return before[0] is after[0] and before[1:] == after[1:]


def read_headers(fields: Iterable[tuple[bytes, bytes]]) -> CallHeaders:
    """Return what the fields of a request say. Raises MalformedRequest."""
    pseudo: dict[bytes, bytes] = {}
    named: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    problem: Refusal | None = None
    is_in_pseudo = True
    size = 0
    for name, value in fields:
        size += len(name) + len(value) + _FIELD_BYTES
        if name.startswith(b":"):
            if not is_in_pseudo or name not in _PSEUDO or name in pseudo:
                raise MalformedRequest(f"the pseudo-header {_shown(name)} is unknown, repeated or after other headers")
            pseudo[name] = value
            continue
        is_in_pseudo = False
        _check_field(name, value)
        if name in _HIDDEN or name.startswith(b"grpc-"):
            if name == b"content-length" and name in named and named[name] != value:
                raise MalformedRequest("there are two values of content-length")
            named[name] = value
            continue
        try:
            metadata.append(_metadatum(name, value))
        except ValueError as error:
            problem = Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the metadata {_shown(name)} {error}")
    if not pseudo.get(b":method") or not pseudo.get(b":scheme") or not pseudo.get(b":path"):
        raise MalformedRequest("a request needs :method, :scheme and :path")
    timeout_s, late = _timeout(named.get(b"grpc-timeout"))
    return CallHeaders(
        path=pseudo[b":path"],
        metadata=tuple(metadata),
        timeout_s=timeout_s,
        encoding=named.get(b"grpc-encoding", b"identity").decode("latin-1"),
        accepts=frozenset(item.strip() for item in named.get(b"grpc-accept-encoding", b"").decode("latin-1").split(",")),
        content_length=_content_length(named.get(b"content-length")),
        refusal=_not_grpc(pseudo[b":method"], named.get(b"content-type", b"")) or problem or late,
        size_bytes=size,
    )


def _check_field(name: bytes, value: bytes) -> None:
    """Raises MalformedRequest (RFC 9113, 8.2)."""
    if not _NAME.fullmatch(name):
        raise MalformedRequest(f"the header name {_shown(name)} has a character that is not allowed")
    if _BAD_IN_VALUE.search(value) or value[:1] in (b" ", b"\t") or value[-1:] in (b" ", b"\t"):
        raise MalformedRequest(f"the value of the header {_shown(name)} has a character that is not allowed")
    if name in _OF_CONNECTION or (name == b"te" and value != b"trailers"):
        raise MalformedRequest(f"the header {_shown(name)} has no place in HTTP/2")


def _metadatum(name: bytes, value: bytes) -> tuple[str, str | bytes]:
    """Raises ValueError."""
    key = name.decode("ascii")
    if not key.endswith("-bin"):
        try:
            return key, value.decode()
        except UnicodeDecodeError:
            raise ValueError("is not text") from None
    try:
        parts = [base64.b64decode(part + b"=" * (-len(part) % 4), validate=True) for part in value.split(b",")]
    except binascii.Error:
        raise ValueError("is not base64") from None
    return key, b",".join(parts)


def _timeout(value: bytes | None) -> tuple[float | None, Refusal | None]:
    if value is None:
        return None, None
    match = _TIMEOUT.fullmatch(value.decode("latin-1"))
    if match is None:
        text = f"grpc-timeout must be up to 8 digits and one of H, M, S, m, u, n, got {_shown(value)}"
        return None, Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
    return int(match[1]) * _UNIT_S[match[2]], None


def _content_length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise MalformedRequest(f"content-length is {_shown(value)}, not a number")
    return int(value)


def _not_grpc(method: bytes, content_type: bytes) -> Refusal | None:
    if method != b"POST":
        return Refusal(grpc.StatusCode.INTERNAL, f"gRPC calls have the method POST, got {_shown(method)}", 405)
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"application/grpc" and not kind.startswith(b"application/grpc+"):
        text = f"gRPC calls have the content type application/grpc, got {_shown(content_type)}"
        return Refusal(grpc.StatusCode.INTERNAL, text, 415)
    return None


def _shown(value: bytes) -> str:
    return repr(value[:80])[1:]


# Responses


def _integer(value: int, bits: int, first: int) -> bytes:
    """Encode an integer with a prefix of so many bits in a byte that has the others (RFC 7541, 5.1)."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes((first | value,))
    encoded = bytearray((first | limit,))
    value -= limit
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _string(value: bytes) -> bytes:
    return _integer(len(value), 7, 0) + value


def _literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """Encode a field; with `first` 0x40 the client puts it into its table."""
    return bytes((first,)) + _string(name) + _string(value)


_INDEXED: Final = 0x40
_STATUS_200: Final = b"\x88"
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_ACCEPT: Final = (b"grpc-accept-encoding", ACCEPTED_ENCODINGS.encode())
_STATUS_OK: Final = (b"grpc-status", b"0")
_PLAIN_HEAD: Final = _STATUS_200 + _literal(*_CONTENT_TYPE) + _literal(*_ACCEPT)
_PLAIN_OK: Final = _literal(*_STATUS_OK)
_FIRST_HEAD: Final = _STATUS_200 + _literal(*_CONTENT_TYPE, _INDEXED) + _literal(*_ACCEPT, _INDEXED)
_FIRST_OK: Final = _literal(*_STATUS_OK, _INDEXED)
_NEXT_HEAD: Final = b"\x88\xbf\xbe"
"""Before a first status was sent: the two fields are entries 63 and 62 of the client's table."""
_LATER_HEAD: Final = b"\x88\xc0\xbf"
"""The status is entry 62 and has moved them."""
_LATER_OK: Final = b"\xbe"
_EMPTY_TABLE: Final = b"\x20"


class HeaderEncoder:
    """Encodes the header blocks of one connection's responses, which have to be sent all and in order."""

    __slots__ = ("_head", "_ok", "_owes_update", "_uses_table")

    def __init__(self) -> None:
        self._uses_table = True
        self._owes_update = False
        self._head, self._ok = _FIRST_HEAD, _FIRST_OK

    def table_resized(self, size: int) -> None:
        """Apply the client's setting. With a table that is smaller than the default, nothing is put into it."""
        if size < _TABLE_BYTES and self._uses_table:
            self._uses_table, self._owes_update = False, True
            self._head, self._ok = _PLAIN_HEAD, _PLAIN_OK

    def response(self, encoding: str = "") -> bytes:
        """Return the block at the beginning of a response, whose compressed messages have `encoding`."""
        block = self._head
        if self._uses_table:
            if block is _FIRST_HEAD:
                self._head = _NEXT_HEAD
        elif self._owes_update:
            block = self._updated(block)
        return block + _literal(b"grpc-encoding", encoding.encode()) if encoding else block

    def success(self) -> bytes:
        """Return the block of the trailers of a call that has succeeded, without metadata."""
        block = self._ok
        if block is _FIRST_OK:
            self._ok = _LATER_OK
            self._head = _LATER_HEAD
        return block

    def trailers(self, status: int, text: str, metadata: Metadata) -> bytes:
        """Return the block of trailers after a response that has begun."""
        fields = [_literal(b"grpc-status", b"%d" % status)]
        if text:
            fields.append(_literal(b"grpc-message", quote(text, safe=_PRINTABLE).encode()))
        fields += (_literal(*encode_metadatum(name, value)) for name, value in metadata)
        return b"".join(fields)

    def failure(self, status: int, text: str, metadata: Metadata, http_status: int = 200) -> bytes:
        """Return the block of a response that has only trailers."""
        head = _STATUS_200 if http_status == 200 else _literal(b":status", b"%d" % http_status)
        block = head + _literal(*_CONTENT_TYPE) + _literal(*_ACCEPT) + self.trailers(status, text, metadata)
        return self._updated(block) if self._owes_update else block

    def _updated(self, block: bytes) -> bytes:
        self._owes_update = False
        return _EMPTY_TABLE + block


def encode_metadatum(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    """Return the field for an item of metadata; bytes, under a name that ends with -bin, are sent as base64."""
    if isinstance(value, bytes):
        return name.encode("ascii"), base64.b64encode(value).rstrip(b"=")
    return name.encode("ascii"), value.encode("ascii", "replace")
