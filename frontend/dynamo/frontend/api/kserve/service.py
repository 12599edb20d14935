"""KServe v2 over gRPC: every call of `inference.GRPCInferenceService`, from bytes to bytes.

Inference is in `infer.py` and `stream.py`; the other calls are handled here by the data plane.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter_ns
from typing import NoReturn

import grpc
import grpc.aio

from dynamo.common.errors import DeadlineExceeded, ShuttingDown, Unsupported
from dynamo.common.logs import request_id as logged_id
from dynamo.common.model_card import ModelCard
from dynamo.common.observability.reception import EdgeProtocol
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.common.tensors.known_heads import KnownHeads
from dynamo.common.tensors.message_limits import MessageScanner, parse_message
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.calls import EXPLAIN, read_call, usable_id
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import HEALTH, Declaration
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve import declarations as kserve
from dynamo.frontend.api.kserve import messages as kserve_messages
from dynamo.frontend.api.kserve.infer import TENSOR_ENDPOINT, call_for, check_size, infer
from dynamo.frontend.api.kserve.model_files import ModelLoadRequest
from dynamo.frontend.api.kserve.placed import is_placed, place
from dynamo.frontend.api.kserve.repository_requests import check_repository, load_request, unload_request
from dynamo.frontend.api.kserve.server import NO_CUDA, KserveServer, check_cuda
from dynamo.frontend.api.kserve.stream import KserveStream
from dynamo.frontend.api.kserve.words import check_version, kserve_message
from dynamo.frontend.api.rpc.handlers import PendingMessage, call_occupancy, read_buffer
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.api.statuses import grpc_status, log_failure, retry_after_s
from dynamo.frontend.config import GrpcOptions, OverloadStatus
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.keys import key_name
from dynamo.frontend.serving.call import Call, Progress
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.protos import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"

_log = logging.getLogger(__name__)


class KserveService:
    """The operations of the service, which `serve_grpc` takes; `drain` stops the reading of streams at shutdown."""

    def __init__(
        self,
        plane: DataPlane,
        readiness: Readiness,
        drain: StreamDrain,
        options: GrpcOptions,
        account: Callable[[], Account],
        overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
        capacity: Capacity | None = None,
        server: KserveServer | None = None,
    ) -> None:
        """`capacity` is what requests within streams count against; calls count elsewhere."""
        self._plane = plane
        self._readiness = readiness
        self._drain = drain
        self._options = options
        self._account = account
        self._scanner = MessageScanner(pb.ModelInferRequest, options.limits)
        self._known_heads = KnownHeads()
        self._overload = overload
        self._capacity = capacity or Capacity()
        self._live = pb.ServerLiveResponse(live=True).SerializeToString()
        self._steps = Steps(owner=key_name.get)
        self._server = server or KserveServer()
        self._metadata = kserve_messages.server_metadata(self._server.name).SerializeToString()

    def operations(self) -> list[GrpcOperation]:
        unary = self._unary
        infer, stream_infer = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
        return [
            GrpcOperation(path=infer, declared=kserve.INFER, handle=self._model_infer),
            GrpcOperation(
                path=stream_infer,
                declared=kserve.INFER,
                handle=self._model_stream_infer,
                reads_stream=True,
                writes_stream=True,
            ),
            unary("ServerLive", HEALTH, self._server_live),
            unary("ServerReady", HEALTH, self._server_ready),
            unary("ModelReady", HEALTH, self._model_ready),
            unary("ServerMetadata", kserve.METADATA, self._server_metadata),
            unary("ModelMetadata", kserve.METADATA, self._model_metadata),
            unary("ModelConfig", kserve.CONFIG, self._model_config),
            unary("ModelStatistics", kserve.STATISTICS, self._model_statistics),
            unary("RepositoryIndex", kserve.INDEX, self._repository_index),
            unary("RepositoryModelLoad", kserve.LOAD, self._repository_model_load, _loaded_model),
            unary("RepositoryModelUnload", kserve.UNLOAD, self._repository_model_unload, _unloaded_model),
            unary("TraceSetting", kserve.SET_TRACE, self._trace_setting),
            unary("LogSettings", kserve.SET_LOG, self._log_settings),
            unary("SystemSharedMemoryStatus", kserve.REGIONS, self._shared_memory_status),
            unary("SystemSharedMemoryRegister", kserve.SET_REGION, self._shared_memory_register),
            unary("SystemSharedMemoryUnregister", kserve.SET_REGION, self._shared_memory_unregister),
            unary("CudaSharedMemoryStatus", kserve.REGIONS, self._cuda_status),
            unary("CudaSharedMemoryRegister", kserve.SET_REGION, self._cuda_register),
            unary("CudaSharedMemoryUnregister", kserve.SET_REGION, self._cuda_unregister),
        ]

    def _unary(
        self,
        name: str,
        declared: Declaration,
        method: Callable[[Buffer, str], Awaitable[bytes]],
        model_of: Callable[[Buffer], str] | None = None,
    ) -> GrpcOperation:
        """`method` gets the address of the client beside the message."""

        async def handle(request: Buffer | PendingMessage, context: Context) -> bytes:
            request_id = _client_request_id(context)
            try:
                if request_id:
                    context.set_trailing_metadata((("x-request-id", request_id),))
                return await method(await read_buffer(request), context.peer())
            except Exception as error:
                await self._abort(context, error, request_id, name)

        return GrpcOperation(path=f"/{SERVICE}/{name}", declared=declared, handle=handle, model_of=model_of)

    # Inference

    async def _model_infer(self, message: Buffer | PendingMessage, context: Context) -> Buffer:
        request_id = ""
        explanation: Explanation | None = None
        progress = Progress()
        try:
            headers, left_s = context.invocation_metadata() or (), context.time_remaining()
            call = read_call(self._account(), headers, left_s, progress=progress, occupied=call_occupancy.get())
            request_id, explanation = call.request_id, call.explanation
            waits_ns = perf_counter_ns()
            data = await message.read() if isinstance(message, PendingMessage) else message
            read_ns = perf_counter_ns()
            known = self._known_heads.find(data)
            request = TensorRequest.parse(data, self._scanner) if known is None else known
            head = request.head
            response = await self._plane.names.serve(
                call,
                head.model_name,
                partial(self._respond, request, waits_ns, read_ns, context),
                version=head.model_version and check_version(head.model_version),
                sequence=request.sequence if head.parameters else "",
            )
            check_size(response, self._options.max_message_bytes)
            if request_id or explanation is not None:
                context.set_trailing_metadata(_trailing_metadata(call))
            return response
        except Exception as error:
            if not progress.started:
                self._plane.refused(TENSOR_ENDPOINT, error)
            await self._abort(context, error, request_id, "ModelInfer", explanation)

    def _respond(
        self, request: TensorRequest, waits_ns: int, read_ns: int, context: Context, model: NamedModel, call: Call
    ) -> Awaitable[Buffer]:
        call = self._server.timed(call, model.card.name, EdgeProtocol.GRPC, waits_ns, read_ns)
        call = call_for(request, model, call, RequestType.UNARY)
        logged_id.set(call.request_id)
        if not request.is_known:
            if is_placed(request.head):
                return self._infer_placed(request.renamed(model.name), model, call, context.peer())
            self._known_heads.add(request)
        if request.head.model_name != model.name:
            request = request.renamed(model.name)
        return infer(self._plane, model, request, call)

    async def _infer_placed(self, request: TensorRequest, model: NamedModel, call: Call, peer: str) -> Buffer:
        placed = self._server.find_places(request, call.account, peer)
        return place(await infer(self._plane, model, request, call, placed), placed.places)

    async def _model_stream_infer(self, unused: object, context: Context) -> None:
        request_id = ""
        explanation: Explanation | None = None
        try:
            headers, left_s = context.invocation_metadata() or (), context.time_remaining()
            call = read_call(self._account(), headers, left_s, progress=Progress())
            request_id, explanation = call.request_id, call.explanation
            stream = KserveStream(
                self._plane, self._drain, self._scanner, self._options, self._capacity, context, call, self._server
            )
            await stream.run()
            if request_id or explanation is not None:
                context.set_trailing_metadata(_trailing_metadata(call))
        except Exception as error:
            log = not isinstance(error, ShuttingDown | DeadlineExceeded)
            await self._abort(context, error, request_id, "ModelStreamInfer", explanation, log=log)

    # Health

    async def _server_live(self, data: Buffer, peer: str) -> bytes:
        return self._live

    async def _server_ready(self, data: Buffer, peer: str) -> bytes:
        return pb.ServerReadyResponse(ready=self._readiness.is_server_ready()).SerializeToString()

    async def _model_ready(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.ModelReadyRequest, data)
        ready = self._readiness.is_model_ready(request.name, check_version(request.version))
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    # Metadata

    async def _server_metadata(self, data: Buffer, peer: str) -> bytes:
        return self._metadata

    async def _model_metadata(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.ModelMetadataRequest, data)
        card = self._card(request.name, request.version)
        is_long = kserve_messages.is_long(card)
        described = self._plane.descriptions.run_if(is_long, kserve_messages.model_metadata, card, request.version)
        return (await described).SerializeToString()

    async def _model_config(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.ModelConfigRequest, data)
        card = self._card(request.name, request.version)
        described = self._plane.descriptions.run_if(kserve_messages.is_long(card), kserve_messages.model_config, card)
        return (await described).SerializeToString()

    async def _model_statistics(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.ModelStatisticsRequest, data)
        statistics = await kserve_messages.statistics(self._plane, self._account(), request.name, request.version)
        return statistics.SerializeToString()

    def _card(self, name: str, version: str) -> ModelCard:
        return self._plane.described(self._account(), name, check_version(version))

    async def _repository_index(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.RepositoryIndexRequest, data)
        check_repository(request.repository_name)
        return await self._steps.run(self._index(self._account(), request.ready))

    def _index(self, account: Account, only_ready: bool) -> Work[bytes]:
        index = yield from kserve_messages.index_of(self._plane, self._readiness.is_model_ready, account, only_ready=only_ready)
        parts = []
        for entry in index:
            yield 0
            parts.append(pb.RepositoryIndexResponse(models=[entry]).SerializeToString())
        return b"".join(parts)  # messages one after the other are one with the entries of all

    async def _repository_model_load(self, data: Buffer, peer: str) -> bytes:
        message = ModelLoadRequest.parse(data)
        model = message.head.model_name
        check_repository(message.head.repository_name)
        request, files = load_request(model, message.parameters())
        await self._plane.load_model(self._account(), request, files)
        return pb.RepositoryModelLoadResponse(model_name=model, isLoaded=True).SerializeToString()

    async def _repository_model_unload(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.RepositoryModelUnloadRequest, data)
        check_repository(request.repository_name)
        await self._plane.unload_model(self._account(), unload_request(request.model_name, request.parameters))
        return pb.RepositoryModelUnloadResponse(model_name=request.model_name, isUnloaded=True).SerializeToString()

    # Settings

    async def _trace_setting(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.TraceSettingRequest, data)
        settings = {key: list(setting.value) or None for key, setting in request.settings.items()}
        response = pb.TraceSettingResponse()
        shown = await self._server.trace_settings(self._plane, self._account(), request.model_name, settings)
        for key, values in shown.items():
            response.settings[key].value.extend(values)
        return response.SerializeToString()

    async def _log_settings(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.LogSettingsRequest, data)
        settings = {
            key: getattr(setting, kind)
            for key, setting in request.settings.items()
            if (kind := setting.WhichOneof("parameter_choice")) is not None
        }
        await self._server.settings.change_log(settings)
        response = pb.LogSettingsResponse()
        for key, value in self._server.settings.log().items():
            match value:
                case bool():
                    response.settings[key].bool_param = value
                case int():
                    response.settings[key].uint32_param = value
                case str():
                    response.settings[key].string_param = value
        return response.SerializeToString()

    # Shared memory

    async def _shared_memory_status(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.SystemSharedMemoryStatusRequest, data)
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._server.regions.status(request.name):
            status = response.regions[region.name]
            status.name, status.key, status.offset, status.byte_size = region.name, region.key, region.offset, region.size_bytes
        return response.SerializeToString()

    async def _shared_memory_register(self, data: Buffer, peer: str) -> bytes:
        request = parse_message(pb.SystemSharedMemoryRegisterRequest, data)
        self._server.register_memory(self._account(), peer, request.name, request.key, request.offset, request.byte_size)
        return b""

    async def _shared_memory_unregister(self, data: Buffer, peer: str) -> bytes:
        self._server.regions.unregister(parse_message(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return b""

    async def _cuda_status(self, data: Buffer, peer: str) -> bytes:
        check_cuda(parse_message(pb.CudaSharedMemoryStatusRequest, data).name)
        return b""

    async def _cuda_register(self, data: Buffer, peer: str) -> bytes:
        raise Unsupported(NO_CUDA)

    async def _cuda_unregister(self, data: Buffer, peer: str) -> bytes:
        return b""

    # Failures

    async def _abort(
        self,
        context: Context,
        error: Exception,
        request_id: str,
        what: str,
        explanation: Explanation | None = None,
        *,
        log: bool = True,
    ) -> NoReturn:
        """End the call with the failure's status and a public message; log failures of the server."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        request_id = request_id or logged_id.get() or secrets.token_hex(12)
        if log:
            log_failure(error, request_id, what)
        metadata: list[tuple[str, str | bytes]] = [("x-request-id", request_id)]
        if (pause_s := retry_after_s(error)) is not None:
            metadata.append(("retry-after", f"{pause_s:g}"))
        if explanation is not None:
            metadata += _explanation_metadata(explanation)
        await context.abort(grpc_status(error, self._overload), kserve_message(error), tuple(metadata))


def _loaded_model(message: Buffer) -> str:
    return str(ModelLoadRequest.parse(message).head.model_name)


def _unloaded_model(message: Buffer) -> str:
    return str(parse_message(pb.RepositoryModelUnloadRequest, message).model_name)


def _client_request_id(context: Context) -> str:
    value = next((value for name, value in context.invocation_metadata() or () if name == "x-request-id"), "")
    return usable_id(value) if isinstance(value, str) else ""


def _trailing_metadata(call: Call) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a response: the caller's request id, and the explanation of routing decisions."""
    named = (("x-request-id", call.request_id),) if call.request_id else ()
    return named if call.explanation is None else (*named, *_explanation_metadata(call.explanation))


def _explanation_metadata(explanation: Explanation) -> tuple[tuple[str, str], ...]:
    """Return the explanation of routing decisions as metadata."""
    text = explanation.to_json()
    return ((EXPLAIN, text.decode()),) if text else ()
