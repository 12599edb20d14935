"""What gRPC methods declare beside their handlers: none is forgotten, and HTTP declares the same for the same."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, cast

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import Declaration
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve.declarations import GENERATE, INFER
from dynamo.frontend.api.kserve.rest.operations import kserve_operations
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.health import REFLECTION_SERVICES
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import FrontendConfig, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.data_plane import open_data_plane
from dynamo.frontend.wiring.grpc import grpc_operations
from dynamo.protos import inference_pb2 as pb
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeTexts

SAME_OVER_HTTP = {
    "ServerLive": ("GET", "/v2/health/live"),
    "ServerReady": ("GET", "/v2/health/ready"),
    "ModelReady": ("GET", "/v2/models/{model:path}/ready"),
    "ServerMetadata": ("GET", "/v2"),
    "ModelMetadata": ("GET", "/v2/models/{model:path}"),
    "ModelInfer": ("POST", "/v2/models/{model:path}/infer"),
    "ModelStreamInfer": ("POST", "/v2/models/{model:path}/generate_stream"),
    "ModelConfig": ("GET", "/v2/models/{model:path}/config"),
    "ModelStatistics": ("GET", "/v2/models/stats"),
    "RepositoryIndex": ("POST", "/v2/repository/index"),
    "RepositoryModelLoad": ("POST", "/v2/repository/models/{model:path}/load"),
    "RepositoryModelUnload": ("POST", "/v2/repository/models/{model:path}/unload"),
    "TraceSetting": ("POST", "/v2/trace/setting"),
    "LogSettings": ("POST", "/v2/logging"),
    "SystemSharedMemoryStatus": ("GET", "/v2/systemsharedmemory/status"),
    "SystemSharedMemoryRegister": ("POST", "/v2/systemsharedmemory/region/{region:path}/register"),
    "SystemSharedMemoryUnregister": ("POST", "/v2/systemsharedmemory/unregister"),
    "CudaSharedMemoryStatus": ("GET", "/v2/cudasharedmemory/status"),
    "CudaSharedMemoryRegister": ("POST", "/v2/cudasharedmemory/region/{region:path}/register"),
    "CudaSharedMemoryUnregister": ("POST", "/v2/cudasharedmemory/unregister"),
}


@pytest.fixture
async def operations() -> list[GrpcOperation]:
    metrics, settings = FrontendMetrics(CollectorRegistry()), ServingOptions()
    async with open_data_plane(FakeDirectory(), FakeClient(), FakeLink(), RoundRobin(), FakeTexts(), metrics, settings) as plane:
        return grpc_operations(FrontendConfig(), plane, Readiness(), StreamDrain(), lambda: ANONYMOUS, Capacity(), KserveServer())


def promised(service: ServiceDescriptor, name: str = "") -> set[tuple[str, bool, bool]]:
    return {(f"/{name or service.full_name}/{m.name}", m.client_streaming, m.server_streaming) for m in service.methods}


def test_every_method_that_reflection_describes_is_served(operations: list[GrpcOperation]) -> None:
    expected = promised(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"])
    expected |= promised(health_pb2.DESCRIPTOR.services_by_name["Health"])
    for service in REFLECTION_SERVICES:
        expected |= promised(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"], service)
    assert {(each.path, each.reads_stream, each.writes_stream) for each in operations} == expected
    assert len(operations) == len(expected)


def test_a_method_and_its_path_over_http_declare_the_same(operations: list[GrpcOperation]) -> None:
    rest = kserve_operations(cast(Any, None), Readiness(), KserveServer())
    over_http = {(each.method, each.path): each.declared for each in rest}
    declared = {each.method: each.declared for each in operations if each.service == SERVICE}
    same = {method: over_http[path] for method, path in SAME_OVER_HTTP.items()}
    assert declared == same | {"ModelInfer": INFER, "ModelStreamInfer": INFER}
    assert (same["ModelInfer"], same["ModelStreamInfer"]) == (replace(INFER, copies=2), GENERATE)


@pytest.mark.parametrize("forgotten", ["path", "declared", "handle"])
def test_a_method_without_a_declaration_does_not_start(operations: list[GrpcOperation], forgotten: str) -> None:
    parts = {name: getattr(operations[0], name) for name in ("path", "declared", "handle")}
    assert GrpcOperation(**parts) == operations[0]
    del parts[forgotten]
    with pytest.raises(TypeError, match=f"'{forgotten}'"):
        GrpcOperation(**parts)


@pytest.mark.parametrize("forgotten", [field.name for field in fields(Declaration)])
def test_no_part_of_a_declaration_has_a_default(forgotten: str) -> None:
    parts = {field.name: getattr(INFER, field.name) for field in fields(Declaration)}
    assert Declaration(**parts) == INFER
    del parts[forgotten]
    with pytest.raises(TypeError, match=f"'{forgotten}'"):
        Declaration(**parts)


def test_audits_learn_which_model_a_message_names(operations: list[GrpcOperation]) -> None:
    naming = {each.method: each.model_of for each in operations if each.model_of is not None}
    assert naming.keys() == {"RepositoryModelLoad", "RepositoryModelUnload"}
    for model_of in naming.values():
        assert model_of(pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()) == "m"
        with pytest.raises(InvalidRequest):
            model_of(b"\xff")
