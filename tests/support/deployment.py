"""A whole deployment inside the test's process, with clients of both protocols: frontend, worker, real etcd and NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2

from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import AccessOptions, FrontendConfig, GrpcOptions, HttpOptions
from dynamo.frontend.security.keys import Limits, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from dynamo.protos import inference_pb2 as pb
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.echo import EchoTensors, EchoTokens
from tests.support.servers import EtcdServer, NatsServer
from tests.support.statuses import STATUSES

SERVICE = "/inference.GRPCInferenceService/"
TENSOR: Mapping[str, Any] = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}


@dataclass(frozen=True, slots=True)
class KeyFile:
    """An API key file whose keys are known to the test."""

    path: Path
    keys: dict[str, str]

    def add(
        self, name: str, *scopes: Scope, models: tuple[str, ...] = ("*",), expires: str | None = None, **limits: float
    ) -> str:
        """A new key, known to the server within two seconds."""
        key = make_key()
        existing = self.path.read_text() if self.path.exists() else ""
        entry = entry_for(
            key,
            name,
            scopes=scopes or (Scope.INFER,),
            models=models,
            limits=Limits(**limits),  # type: ignore[arg-type]
            expires=expires,
        )
        self._write(existing + entry)
        self.keys[name] = key
        return key

    def remove_all(self) -> None:
        self._write("[]\n")

    def _write(self, text: str) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self.path)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that failed, as either protocol says it."""

    status: int
    """HTTP's; gRPC's is mapped to it."""
    message: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InProcessDeployment:
    frontend: Frontend
    worker: Worker
    http: httpx2.AsyncClient
    channel: grpc.aio.Channel

    async def post(self, path: str, body: object = None, **headers: str) -> httpx2.Response:
        """`headers` by their names with `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json=body, headers=named)

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def call(self, method: str, message: bytes = b"", **headers: str) -> Refusal:
        """One unary gRPC call; its answer is thrown away."""
        path = method if method.startswith("/") else SERVICE + method
        start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(path)
        call = start(message, metadata=metadata(headers), timeout=120)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            trailing = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
            return Refusal(STATUSES[error.code()], error.details() or "", trailing)
        trailing = {str(name): str(value) for name, value in await call.trailing_metadata() or ()}
        return Refusal(200, "", trailing)

    def stream(self, **headers: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """A ModelStreamInfer call."""
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        return start(metadata=metadata(headers))


def metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.replace("_", "-"), value) for name, value in headers.items())


def infer_request(model: str = "echo", **parameters: int) -> bytes:
    """A tensor request for EchoTensors."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request.SerializeToString()


def text_request(max_tokens: int, model: str = "echo-llm") -> bytes:
    """A streamed text request for EchoTokens."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"say")
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = max_tokens
    return request.SerializeToString()


@asynccontextmanager
async def open_deployment(
    etcd: EtcdServer,
    nats: NatsServer,
    namespace: str,
    *,
    access: AccessOptions | None = None,
    logins: Mapping[str, Mapping[str, Any]] | None = None,
) -> AsyncIterator[InProcessDeployment]:
    """A frontend with one worker that serves `echo` (tensors) and `echo-llm` (text), with production's defaults.

    `logins`: `user` and `password` of the `frontend` and the `worker` at etcd.
    """
    logins = logins or {"frontend": {}, "worker": {}}
    bus = NatsOptions(servers=(nats.url,))
    config = FrontendConfig(
        namespace=namespace,
        http=HttpOptions(port=0),
        grpc=GrpcOptions(enabled=True, port=0),
        access=access or AccessOptions(),
        nats=bus,
        etcd=EtcdOptions(endpoints=(etcd.endpoint,), **logins["frontend"]),
    )
    worker_config = WorkerConfig(namespace=namespace, nats=bus, etcd=EtcdOptions(endpoints=(etcd.endpoint,), **logins["worker"]))
    async with (
        open_worker([EchoTensors(), EchoTokens()], worker_config) as worker,
        serve_frontend(config) as frontend,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=120) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel,
    ):
        async with asyncio.timeout(120):
            while not all(frontend.readiness.is_model_ready(model) for model in ("echo", "echo-llm")):
                await asyncio.sleep(0.01)
        yield InProcessDeployment(frontend, worker, http, channel)
