"""The few parts of protobuf's wire format that are handled by hand, where large bytes or many small messages are worth it."""

from __future__ import annotations

from google.protobuf.message import Message

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types; BYTES are all length-delimited fields."""


def varint(value: int) -> bytes:
    """Return `value`, which is not negative, as a varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(message: type[Message], field: str) -> bytes:
    """Return the encoded key of a length-delimited field of `message`."""
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | BYTES)


def delimited(field_tag: bytes, payload: bytes) -> bytes:
    """Return a whole length-delimited field: its key, length and payload."""
    return field_tag + varint(len(payload)) + payload


def read_varint(data: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """Return the varint at `position`, and the position after it.

    Raises ValueError if it is longer than 64 bits, IndexError if it is truncated.
    """
    value = shift = 0
    while True:
        octet = data[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 64 bits")
