"""A protobuf schema as plain data, to be compared across processes.

Run as a script, it prints the schema that tritonclient has: its messages cannot be loaded beside ours.
"""

from __future__ import annotations

import json
import sys

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

Schema = dict[str, str]


def schema_of(*files: FileDescriptor) -> Schema:
    """Every field, enum value and call by its full name, with all that reaches the wire about it."""
    schema: Schema = {}
    for file in files:
        described = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(described)
        for enum in described.enum_type:
            _add_enum(schema, described.package, enum)
        for message in described.message_type:
            _add_message(schema, described.package, message)
        for service in described.service:
            for call in service.method:
                schema[f"{described.package}.{service.name}/{call.name}"] = (
                    f"{call.client_streaming}:{call.input_type} -> {call.server_streaming}:{call.output_type}"
                )
    return schema


def _add_enum(schema: Schema, scope: str, enum: descriptor_pb2.EnumDescriptorProto) -> None:
    for value in enum.value:
        schema[f"{scope}.{enum.name}.{value.name}"] = str(value.number)


def _add_message(schema: Schema, scope: str, message: descriptor_pb2.DescriptorProto) -> None:
    name = f"{scope}.{message.name}"
    schema[name] = "map entry" if message.options.map_entry else "message"
    for field in message.field:
        choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        schema[f"{name}.{field.name}"] = f"{field.number} {field.label} {field.type} {field.type_name} {choice}"
    for enum in message.enum_type:
        _add_enum(schema, name, enum)
    for nested in message.nested_type:
        _add_message(schema, name, nested)


if __name__ == "__main__":
    from tritonclient.grpc import model_config_pb2, service_pb2  # type: ignore[import-untyped]

    json.dump(schema_of(model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR), sys.stdout)
