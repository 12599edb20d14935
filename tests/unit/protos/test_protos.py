from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.protos import etcd_pb2, inference_pb2, model_config_pb2
from tests.support import descriptors


@pytest.fixture(scope="module")
def ours() -> descriptors.Schema:
    return descriptors.schema_of(model_config_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR)


@pytest.fixture(scope="module")
def theirs() -> descriptors.Schema:
    """tritonclient's."""
    script = Path(descriptors.__file__)
    printed = subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=120).stdout
    return json.loads(printed)


def test_every_message_field_enum_value_and_call_of_tritonclient_is_here_with_the_same_wire_form(
    ours: descriptors.Schema, theirs: descriptors.Schema
) -> None:
    assert len(theirs) > 300
    assert {name: ours.get(name) for name in theirs} == theirs


def test_what_is_here_beyond_tritonclient_is_what_other_kserve_clients_know(
    ours: descriptors.Schema, theirs: descriptors.Schema
) -> None:
    assert {name.removeprefix("inference.") for name in ours.keys() - theirs.keys()} == {
        "ModelMetadataResponse.properties",
        "ModelMetadataResponse.PropertiesEntry",
        "ModelMetadataResponse.PropertiesEntry.key",
        "ModelMetadataResponse.PropertiesEntry.value",
        "RepositoryModelLoadResponse.model_name",
        "RepositoryModelLoadResponse.isLoaded",
        "RepositoryModelUnloadResponse.model_name",
        "RepositoryModelUnloadResponse.isUnloaded",
    }


def test_the_service_has_all_twenty_calls() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == "inference.GRPCInferenceService"
    assert len(service.methods) == 20


def test_etcd_messages_have_etcds_field_numbers() -> None:
    def numbers(message: type) -> dict[str, int]:
        return {field.name: field.number for field in message.DESCRIPTOR.fields}

    assert etcd_pb2.DESCRIPTOR.package == "dynamo.etcd.v1"
    assert numbers(etcd_pb2.KeyValue) == {
        "key": 1,
        "create_revision": 2,
        "mod_revision": 3,
        "version": 4,
        "value": 5,
        "lease": 6,
    }
    assert numbers(etcd_pb2.WatchResponse) == {
        "header": 1,
        "watch_id": 2,
        "created": 3,
        "canceled": 4,
        "compact_revision": 5,
        "cancel_reason": 6,
        "fragment": 7,
        "events": 11,
    }
    watch = etcd_pb2.WatchRequest(create_request=etcd_pb2.WatchCreateRequest(key=b"k", progress_notify=True))
    assert watch.SerializeToString() == b"\x0a\x05\x0a\x01k\x20\x01"
    assert etcd_pb2.LeaseGrantRequest(TTL=10).SerializeToString() == b"\x08\x0a"
    assert etcd_pb2.PutRequest(key=b"k", value=b"v", lease=7).SerializeToString() == b"\x0a\x01k\x12\x01v\x18\x07"
