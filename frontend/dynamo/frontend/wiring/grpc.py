"""The gRPC port: which services it has, and its server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve.infer import TENSOR_ENDPOINT
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.service import SERVICE, KserveService
from dynamo.frontend.api.rpc.bounded import bounded
from dynamo.frontend.api.rpc.guard import account_source, guarded
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES, HealthService, ReflectionService
from dynamo.frontend.api.rpc.metered import metered
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.api.rpc.server import GrpcServer, serve_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.wiring.parts import PortParts
from dynamo.frontend.wiring.plane import Reached


@asynccontextmanager
async def open_grpc(parts: PortParts, guard: Guard, reached: Reached, drain: StreamDrain) -> AsyncIterator[GrpcServer | None]:
    """Serve gRPC until the context is left; None if the configuration does not want it. Raises ConfigError."""
    config, metrics, capacity = parts.config, parts.metrics, parts.capacity
    if not config.grpc.wanted:
        yield None
        return
    refused = partial(metrics.frontend.refused, TENSOR_ENDPOINT)
    kserve = replace(parts.kserve, settings=reached.settings)
    operations = grpc_operations(config, reached.plane, parts.readiness, drain, account_source(guard), capacity, kserve)
    operations = bounded(operations, capacity, config.overload_status, refused)
    operations = metered(guarded(operations, guard, refused), metrics.grpc)
    async with serve_grpc(
        config.grpc,
        operations,
        share_port=parts.share_port,
        guarded=guard.is_on,
        capacity=capacity,
        memory=reached.memory,
        overload=config.overload_status,
        observer=metrics.grpc_connections,
        descriptors=parts.descriptors,
    ) as server:
        yield server


def grpc_operations(
    config: FrontendConfig,
    plane: DataPlane,
    readiness: Readiness,
    drain: StreamDrain,
    account: Callable[[], Account],
    capacity: Capacity,
    kserve: KserveServer,
) -> list[GrpcOperation]:
    """Return everything on the gRPC port."""
    return [
        *KserveService(plane, readiness, drain, config.grpc, account, config.overload_status, capacity, kserve).operations(),
        *HealthService(plane, readiness).operations(),
        *ReflectionService((SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES), drain).operations(),
    ]
