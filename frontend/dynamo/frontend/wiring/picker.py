"""The port of the endpoint picker: its services, and its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.unknown_fields import UnknownFields
from dynamo.frontend.api.openai.operations import read_request_template
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.api.picker.service import PICKER_SERVICE, RESETS_PER_S, PickerService
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES, HealthService, ReflectionService
from dynamo.frontend.api.rpc.metered import metered
from dynamo.frontend.api.rpc.server import GrpcServer, serve_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import OverloadStatus
from dynamo.frontend.wiring.parts import PortParts
from dynamo.frontend.wiring.plane import Reached

PORT_FLAG = "--endpoint-picker-port"


@asynccontextmanager
async def open_picker(parts: PortParts, guard: Guard, reached: Reached, drain: StreamDrain) -> AsyncIterator[GrpcServer | None]:
    """Serve the endpoint picker until the context is left; None if the configuration does not want it. Raises ConfigError."""
    config, metrics = parts.config, parts.metrics
    options = config.endpoint_picker
    if not options.enabled:
        yield None
        return
    settings = HttpSettings(
        options=config.http,
        overload=OverloadStatus.TOO_MANY_REQUESTS,
        capacity=parts.capacity,
        unknown_fields=UnknownFields(count=metrics.frontend.unknown_field),
    )
    operations = protocol_operations(
        *(reached.plane, parts.readiness, config.text),
        kserve=replace(parts.kserve, settings=reached.settings),
        template=read_request_template(config.text.request_template),
    )
    picker = PickerService(reached.plane, operations, guard, settings, options, metrics.picker, metrics.frontend.refused, drain)
    health = HealthService(
        reached.plane,
        parts.readiness,
        {
            "liveness": lambda: True,
            "readiness": parts.readiness.is_server_ready,
            PICKER_SERVICE: parts.readiness.is_server_ready,
        },
    )
    reflection = ReflectionService((HEALTH_SERVICE, *REFLECTION_SERVICES), drain)
    async with serve_grpc(
        config.picker_grpc,
        metered([*picker.operations(), *health.operations(), *reflection.operations()], metrics.grpc),
        share_port=parts.share_port,
        capacity=parts.capacity,
        observer=metrics.grpc_connections,
        descriptors=parts.descriptors,
        flag=PORT_FLAG,
        resets_per_s=RESETS_PER_S,
    ) as server:
        yield server
