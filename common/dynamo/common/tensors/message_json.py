"""Messages of the protocol as JSON objects with the field names of their .proto, as Triton writes them.

Unlike protobuf's own JSON form: 64-bit numbers are numbers, and fields at their default are there.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf.message import Message

Field: TypeAlias = Any
"""A FieldDescriptor of whichever implementation protobuf runs on; the stubs do not agree on one."""


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object. Sub-messages and members of a oneof that are not set are left out."""
    fields: dict[str, Any] = {}
    field: Field
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            of_value = field.message_type.fields_by_name["value"]
            fields[field.name] = {str(key): _value(of_value, value[key]) for key in value}
        elif field.is_repeated:
            fields[field.name] = [_value(field, element) for element in value]
        elif not field.has_presence or message.HasField(field.name):
            fields[field.name] = _value(field, value)
    return fields


def _value(field: Field, value: Any) -> Any:
    if isinstance(value, Message):
        return to_json(value)
    if field.enum_type is not None:
        constant = field.enum_type.values_by_number.get(value)
        return value if constant is None else constant.name
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _is_map(field: Field) -> bool:
    of = field.message_type
    return of is not None and bool(of.GetOptions().map_entry)
