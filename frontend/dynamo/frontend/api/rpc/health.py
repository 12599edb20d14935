"""The standard services that gRPC tools expect: grpc.health.v1 and server reflection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from dynamo.common.errors import InvalidRequest, ModelNotFound, ShuttingDown
from dynamo.common.tensors.message_limits import parse_message
from dynamo.frontend.api.declaration import HEALTH, shown
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.api.rpc.watches import TooManyWatches, Watches
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The messages of both versions are the same on the wire."""
_REFLECTION = replace(shown(Surface.DOCS), deadline_s=None)  # a tool may keep its call


class ServingStatus(IntEnum):
    """The values of grpc.health.v1."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class HealthService:
    """Check and Watch. The `service` is the server (empty, or the name of a gRPC service) or a model's name."""

    def __init__(self, plane: DataPlane, readiness: Readiness, services: Mapping[str, Callable[[], bool]] | None = None) -> None:
        """`services`: further names, and what says whether each is served."""
        self._plane = plane
        self._readiness = readiness
        self._services = services or {}
        self._watches = Watches(self._status, lambda: readiness.draining)
        readiness.on_change(self._watches.look_soon)

    def operations(self) -> list[GrpcOperation]:
        check, watch = f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch"
        return [
            GrpcOperation(path=check, declared=HEALTH, handle=self._check),
            GrpcOperation(path=watch, declared=HEALTH, handle=self._watch, writes_stream=True),
        ]

    def _status(self, service: str) -> ServingStatus:
        if (is_served := self._services.get(service)) is not None:
            ready = is_served()
        elif service in ("", INFERENCE_SERVICE):
            ready = self._readiness.is_server_ready()
        elif service in (HEALTH_SERVICE, *REFLECTION_SERVICES):
            ready = True
        else:
            try:
                self._plane.described(ANONYMOUS, service)  # health is for all
            except ModelNotFound:
                return ServingStatus.SERVICE_UNKNOWN
            ready = self._readiness.is_model_ready(service)
        return ServingStatus.SERVING if ready else ServingStatus.NOT_SERVING

    async def _check(self, request: bytes | PendingMessage, context: Context) -> bytes:
        status = self._status(await _service(request, context))
        if status is ServingStatus.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service or model not found")
        return _response(status)

    async def _watch(self, request: bytes | PendingMessage, context: Context) -> None:
        try:
            with self._watches.entered(context.peer()):  # which names the port of the client, too
                await self._follow(await _service(request, context), context)
        except TooManyWatches as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _follow(self, service: str, context: Context) -> None:
        sent: ServingStatus | None = None
        with self._watches.watching(service) as watched:
            while True:
                change, last = watched.next_change(), self._readiness.draining
                status = self._status(service) if last else watched.status
                if status is not sent:
                    sent = status
                    await context.write(_response(status))
                if last:  # a watch reports the shutdown, and must not delay it
                    return
                await change.wait()


class ReflectionService:
    """Server reflection: lists the services and returns their descriptors."""

    def __init__(self, services: Sequence[str], drain: StreamDrain) -> None:
        self._servicer = ReflectionServicer(services)
        self._drain = drain

    def operations(self) -> list[GrpcOperation]:
        return [
            GrpcOperation(
                path=f"/{service}/ServerReflectionInfo",
                declared=_REFLECTION,
                handle=self._info,
                reads_stream=True,
                writes_stream=True,
            )
            for service in REFLECTION_SERVICES
        ]

    async def _info(self, unused: object, context: Context) -> None:
        try:
            while (data := await self._drain.read(context)) is not None:
                request = parse_message(reflection_pb2.ServerReflectionRequest, bytes(data))
                for response in self._servicer.ServerReflectionInfo(iter((request,)), context):
                    await context.write(response.SerializeToString())
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ShuttingDown as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


async def _service(request: bytes | PendingMessage, context: Context) -> str:
    data = await read_message(request)
    try:
        return str(parse_message(health_pb2.HealthCheckRequest, data).service)
    except InvalidRequest as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _response(status: ServingStatus) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status.value).SerializeToString())
