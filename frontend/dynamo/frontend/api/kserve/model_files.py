"""The files in a RepositoryModelLoadRequest, which stay where they arrived: protobuf would copy them in one go."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.message_limits import parse_message
from dynamo.common.tensors.protobuf_wire import BYTES, FIXED32, FIXED64, VARINT, delimited, read_varint, tag
from dynamo.common.tensors.tensors import Buffer
from dynamo.protos.inference_pb2 import ModelRepositoryParameter, RepositoryModelLoadRequest

MAX_SETTINGS_BYTES = 4 << 20
"""The most that a request to load a model may have beside the model's files."""
_SHORT_BYTES = 64 * 1024
"""A file of this size is copied with the rest."""
_MAX_FIELDS = 8192
"""The most fields of a long request, which has one for each file: to go through them takes 2 µs each."""

_PARAMETERS = tag(RepositoryModelLoadRequest, "parameters")
_CONTENT = tag(ModelRepositoryParameter, "bytes_param")
_SIZES = {FIXED32: 4, FIXED64: 8}
_NAME, _VALUE = b"\x0a", b"\x12"
"""Keys of what an entry of a map consists of."""


@dataclass(frozen=True, slots=True)
class ModelLoadRequest:
    """A parsed RepositoryModelLoadRequest."""

    head: RepositoryModelLoadRequest
    """The request, with a mark in place of the content of each long file."""
    contents: Mapping[bytes, memoryview] = field(default_factory=dict)
    """What the marks stand for."""

    @classmethod
    def parse(cls, message: Buffer) -> ModelLoadRequest:
        """Parse a message of a client. Raises InvalidRequest if it is none, PayloadTooLarge for too much beside its files."""
        contents: dict[bytes, memoryview] = {}
        if len(message) > _SHORT_BYTES:
            try:
                pieces = _cut(memoryview(message), contents)
            except (ValueError, IndexError):
                raise InvalidRequest("the message is not a RepositoryModelLoadRequest") from None
            size = sum(map(len, pieces))
            if size > MAX_SETTINGS_BYTES:
                raise PayloadTooLarge(f"the request has {size} bytes beside its files; at most {MAX_SETTINGS_BYTES} are allowed")
            message = b"".join(pieces)
        return cls(parse_message(RepositoryModelLoadRequest, message), contents)

    def parameters(self) -> dict[str, object]:
        """Return the parameters, each as the type that it has."""
        return {name: self._value(parameter) for name, parameter in self.head.parameters.items()}

    def _value(self, parameter: ModelRepositoryParameter) -> object:
        kind = parameter.WhichOneof("parameter_choice")
        value: object = None if kind is None else getattr(parameter, kind)
        return self.contents.get(value, value) if isinstance(value, bytes) else value


def _cut(message: memoryview, contents: dict[bytes, memoryview]) -> list[Buffer]:
    """Return the pieces of a message in which a mark stands for each long file. Raises ValueError or IndexError if it is none."""
    nonce = secrets.token_bytes(16)
    pieces: list[Buffer] = []
    for key, whole, payload in _fields(message):
        file = _file(payload) if key == _PARAMETERS and len(payload) > _SHORT_BYTES else None
        if file is None:
            pieces.append(whole)
            continue
        name, content = file
        mark = nonce + len(contents).to_bytes(4, "little")
        contents[mark] = content
        value = delimited(_VALUE, delimited(_CONTENT, mark))
        pieces.append(delimited(_PARAMETERS, delimited(_NAME, bytes(name)) + value))
    return pieces


def _file(entry: memoryview) -> tuple[memoryview, memoryview] | None:
    """Return the name and the content of a parameter that has nothing but bytes; None for another one."""
    parts = _only(entry, 2)
    if set(parts) != {_NAME, _VALUE} or len(parts[_NAME]) > _SHORT_BYTES:
        return None
    choices = _only(parts[_VALUE], 1)
    return (parts[_NAME], choices[_CONTENT]) if set(choices) == {_CONTENT} else None


def _only(message: memoryview, count: int) -> dict[bytes, memoryview]:
    """Return the fields of a message with `count` fields, by their keys; nothing if it has more."""
    fields = list(islice(_fields(message), count + 1))
    return {key: payload for key, _, payload in fields} if len(fields) == count else {}


def _fields(message: memoryview) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Yield the fields of a message: the key, the field, and its payload, which is empty for a number.

    Raises ValueError or IndexError if it is no message.
    """
    position = fields = 0
    while position < len(message):
        fields += 1
        if fields > _MAX_FIELDS:
            raise PayloadTooLarge(f"the RepositoryModelLoadRequest has more than {_MAX_FIELDS} fields")
        start = position
        key, position = read_varint(message, position)
        after_key = begin = position
        wire_type = key & 7
        if wire_type == BYTES:
            length, begin = read_varint(message, position)
            position = begin + length
        elif wire_type == VARINT:
            _, position = read_varint(message, position)
        elif wire_type in _SIZES:
            position += _SIZES[wire_type]
        else:
            raise ValueError("groups do not occur in this message")
        if position > len(message):
            raise ValueError("the last field is cut off")
        payload = message[begin:position] if wire_type == BYTES else message[:0]
        yield bytes(message[start:after_key]), message[start:position], payload
