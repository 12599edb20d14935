"""Limits on the fields of protobuf messages, checked by a scan of the wire format before anything is parsed.

A field without contents has two bytes on the wire and a hundred or more once it is parsed, so the size of a message says little
about its cost: parsing 64 MiB of empty inputs takes minutes and gigabytes. The scan takes about 0.3 µs per field, and stops at
the limit. It descends into the messages that the type declares and skips all other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from dynamo.common.config import option, parse_bytes
from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.protobuf_wire import BYTES, FIXED32, FIXED64, VARINT, read_varint
from dynamo.common.tensors.tensors import Buffer

_PACKED: Final = "packed numbers of variable length"
_NAME: Final = "name"
Table: TypeAlias = dict[int, Any]
"""What is scanned in a message, by the field's key: `_PACKED`, `_NAME`, or the table of a message."""

_VARIABLE = frozenset(
    {
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
    }
)
_NAMES = frozenset({"name", "datatype", "id", "model_name", "model_version", "version", "repository_name", "service", "key"})
_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 16 * 1024
"""Up to this size a message of any parts is parsed within a few milliseconds."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """The largest numbers of parts of one message, apart from tensors in raw form."""

    max_message_fields: int = option(
        131_072,
        minimum=1024,
        help="Fields of a message at all levels together, apart from raw tensors; each string of typed contents is one.",
    )
    max_packed_integers: int = option(
        1 << 20,
        minimum=1024,
        help="Integers and booleans in typed contents and shapes of a message together; raw tensors have no such limit.",
    )
    max_typed_bytes: int = option(
        16 * 2**20,
        flags=("--grpc-max-typed-size",),
        parse=parse_bytes,
        minimum=1024,
        maximum=2**31 - 1,
        metavar="SIZE",
        help="Bytes of an inference request apart from raw tensors: typed contents, names, parameters. Raw tensors have the bound"
        " of the message.",
    )
    max_name_bytes: int = 64 * 1024
    """Bytes of each name, id and key."""


class MessageScanner:
    """Checks serialized messages of one type. Making one takes some 20 µs."""

    __slots__ = ("_kind", "_limits", "_table")

    def __init__(self, kind: type[Message], limits: MessageLimits | None = None) -> None:
        self._kind = kind
        self._limits = limits or MessageLimits()
        self._table = _table_of(kind.DESCRIPTOR)

    def check_size(self, size_bytes: int) -> None:
        """Raise PayloadTooLarge for so many bytes apart from raw tensors, which protobuf would copy in one go."""
        most = self._limits.max_typed_bytes
        if size_bytes > most:
            raise PayloadTooLarge(
                f"the {self._kind.DESCRIPTOR.name} has {size_bytes} bytes apart from raw tensors, where at most {most} are"
                " allowed; send tensors in raw_input_contents"
            )

    def check(self, data: Buffer) -> None:
        """Raise PayloadTooLarge if a limit is exceeded, ValueError or IndexError if `data` is no message."""
        _Scan(data, self._kind, self._limits).message(0, len(data), self._table)


def parse_message(kind: type[M], data: Buffer, limits: MessageLimits | None = None) -> M:
    """Parse a message of another process. Raises InvalidRequest if it is none, PayloadTooLarge if it has too many parts."""
    try:
        if len(data) > _SMALL_BYTES:
            MessageScanner(kind, limits).check(data)
        return kind.FromString(data)  # type: ignore[arg-type]  # takes any buffer
    except (DecodeError, ValueError, IndexError):
        raise InvalidRequest(f"the message is not a {kind.DESCRIPTOR.name}") from None


class _Scan:
    """One check."""

    __slots__ = ("_data", "_fields", "_kind", "_limits", "_packed")

    def __init__(self, data: Buffer, kind: type[Message], limits: MessageLimits) -> None:
        self._data = data
        self._kind = kind
        self._limits = limits
        self._fields = self._packed = 0

    def message(self, position: int, end: int, table: Table) -> None:
        data, fields, most = self._data, self._fields, self._limits.max_message_fields
        while position < end:
            fields += 1
            if fields > most:
                raise self._too_many_fields()
            key = data[position]
            position += 1
            if key >= 0x80:
                key, position = read_varint(data, position - 1)
            wire_type = key & 7
            if wire_type == BYTES:
                length = data[position]
                position += 1
                if length >= 0x80:
                    length, position = read_varint(data, position - 1)
                start, position = position, position + length
                inner = table.get(key)
                if inner is None or not length:
                    continue
                if position > end:
                    break
                if inner is _PACKED:
                    self._count_packed(start, position)
                elif inner is _NAME:
                    self._check_name(length)
                else:
                    self._fields = fields
                    self.message(start, position, inner)
                    fields = self._fields
            elif wire_type == VARINT:
                position = position + 1 if data[position] < 0x80 else read_varint(data, position)[1]
            elif wire_type == FIXED64:
                position += 8
            elif wire_type == FIXED32:
                position += 4
            else:
                raise ValueError("groups do not occur in this message")
        if position != end:
            raise ValueError("the last field is truncated")
        self._fields = fields

    def _too_many_fields(self) -> PayloadTooLarge:
        description = self._kind.DESCRIPTOR
        advice = ""
        if "raw_input_contents" in description.fields_by_name:
            advice = "; each string of typed contents is one, and a tensor in raw_input_contents is one whatever its size"
        return PayloadTooLarge(f"the {description.name} has more than {self._limits.max_message_fields} fields{advice}")

    def _count_packed(self, start: int, end: int) -> None:
        most = self._limits.max_packed_integers
        if self._packed + end - start <= most:  # each element has a byte at least
            self._packed += end - start
            return
        octets = np.frombuffer(self._data, np.uint8, end - start, start)
        for chunk in range(0, end - start, _CHUNK_BYTES):
            self._packed += int(np.count_nonzero(octets[chunk : chunk + _CHUNK_BYTES] < 0x80))  # the last byte of each element
            if self._packed > most:
                raise PayloadTooLarge(
                    f"the {self._kind.DESCRIPTOR.name} has more than {most} integers in typed contents and shapes;"
                    " send them in raw_input_contents"
                )

    def _check_name(self, length: int) -> None:
        if length > self._limits.max_name_bytes:
            raise PayloadTooLarge(f"a name of {length} bytes is longer than the limit of {self._limits.max_name_bytes}")


def _table_of(descriptor: Any) -> Table:
    table: Table = {}
    for field in descriptor.fields:
        key = field.number << 3 | BYTES
        if field.message_type is not None:
            table[key] = _table_of(field.message_type)  # no message of these protocols contains itself
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.name in _NAMES:
                table[key] = _NAME
        elif field.is_repeated and field.type in _VARIABLE:
            table[key] = _PACKED
    return table
