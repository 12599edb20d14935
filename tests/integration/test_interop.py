"""Clients that people have call our gRPC server: grpc-go, grpc-java, @grpc/grpc-js, and a reflection client like grpcurl.

Those of three languages make the same calls and print what came of each; what they print is compared with one table.
tritonclient, on grpcio, has its own files: `test_kserve_grpc.py` and others.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest
import pytest_asyncio
import trustme
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.certificates import issue, write_ca
from tests.support.compiled_clients import HAS_GO_GRPC, HAS_JAVA_GRPC, PROTOS, ROOT, build_go_client, build_java_client, run
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S

CLIENTS = Path(__file__).parent / "clients/interop"
MIB = 2**20
pytestmark = [pytest.mark.asyncio(loop_scope="module")]

CONTRACT = {
    "unary": "3.5",
    "gzip": "3.5",
    "big": str(3 * MIB),  # several windows of flow control, both ways
    "too large": f"RESOURCE_EXHAUSTED the message has 5242912 bytes; messages are limited to {4 * MIB}",
    "stream": "1 0 2 1 0",
    "stream error": "start is -1; it must be between 0 and 1000",
    "error": "NOT_FOUND Request for unknown model: 'Zürich' is not found",
    "deadline": "DEADLINE_EXCEEDED",
    "cancel": "CANCELLED",
    "at once": "100",  # of which a connection carries 16, and the others wait at the client
    "silence": "1 0",  # for longer than the server waits with its pings
}
TLS = {"tls": "3.5"}


@dataclass(frozen=True, slots=True)
class Fleet:
    front: FrontendProcess
    secured: FrontendProcess
    ca: Path

    @property
    def arguments(self) -> tuple[str, str, str]:
        return self.front.grpc_target, f"localhost:{self.secured.grpc_port}", str(self.ca)

    async def check(self, *client: str, folder: Path | None = None, **more: str) -> None:
        """Compare the lines of a client with the contract, and see that none of its requests is left behind."""
        status, output, errors = await run(*client, folder=folder)
        assert dict(line.split(": ", 1) for line in output.splitlines()) == CONTRACT | more, errors
        assert status == 0, errors
        async with asyncio.timeout(120), httpx2.AsyncClient() as http:
            for front in (self.front, self.secured):
                while await _inflight(http, front):
                    await asyncio.sleep(0.05)


async def _inflight(http: httpx2.AsyncClient, front: FrontendProcess) -> float:
    metrics = (await http.get(f"http://127.0.0.1:{front.http_port}/metrics")).text
    values = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("dynamo_frontend_inflight_requests{")]
    assert values
    return sum(values)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    etcd_server: EtcdServer, nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    folder, namespace = tmp_path_factory.mktemp("interop"), f"test-{secrets.token_hex(6)}"
    ca = trustme.CA()
    pair = issue(ca, folder, "server")
    where = (etcd_server.endpoint, nats_server.url, namespace)
    flags = ("--max-message-size", str(4 * MIB), "--grpc-max-concurrent-streams", "16", "--grpc-keepalive-s", "1")
    tls = ("--grpc-tls-cert-file", str(pair.cert), "--grpc-tls-key-file", str(pair.key), "--grpc-client-ping-interval-s", "0")
    models = ("--model", "echo", "--model", f"{ROOT}/examples/countdown.py:Countdown")
    async with (
        worker(etcd_server, nats_server, namespace, *models),
        frontend(*where, *flags) as front,
        frontend(*where, *flags, *tls) as secured,
    ):
        await front.serves("echo", "countdown")
        await secured.serves("echo", "countdown")
        yield Fleet(front, secured, write_ca(ca, folder / "ca.pem"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GO_GRPC, reason="Debian's golang-go, golang-google-grpc-dev and protoc-gen-go-grpc are not installed")
async def test_grpc_go(fleet: Fleet, tmp_path: Path) -> None:
    client = await build_go_client(CLIENTS / "main.go", tmp_path / "client", tmp_path / "cache")
    await fleet.check(client, *fleet.arguments, **TLS)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_JAVA_GRPC, reason="a JDK and Debian's libgrpc-java with its compiler plugin are not installed")
async def test_grpc_java(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.check(*await build_java_client(CLIENTS / "Interop.java", tmp_path), fleet.front.grpc_target)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_grpc_js(fleet: Fleet, tmp_path: Path) -> None:
    """It pings every 100 ms during two calls, which one server permits, and the other, with the default interval, does not."""
    for file in (ROOT / "examples/clients/js/package.json", CLIENTS / "interop.mjs"):
        shutil.copy(file, tmp_path)
    status, _, errors = await run("npm", "install", "--no-audit", "--no-fund", "--prefer-offline", folder=tmp_path)
    if status and any(code in errors for code in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")):
        pytest.skip(f"npm cannot reach its registry: {errors.splitlines()[0]}")
    assert status == 0, errors
    client = ("node", "interop.mjs", str(PROTOS), *fleet.arguments)
    await fleet.check(*client, folder=tmp_path, **TLS, **{"pings refused": "RESOURCE_EXHAUSTED"})


def call_by_reflection(target: str) -> tuple[list[str], dict[str, object]]:
    """Return the services that the server names, and the response of a call made from nothing but its descriptors."""
    with grpc.insecure_channel(target) as channel:
        descriptors = reflection.ProtoReflectionDescriptorDatabase(channel)
        services = list(descriptors.get_services())
        service = DescriptorPool(descriptors).FindServiceByName("inference.GRPCInferenceService")
        method = service.methods_by_name["ModelInfer"]
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1.5, 2.5]}}
        call = channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return services, MessageToDict(call(ParseDict({"model_name": "echo", "inputs": [tensor]}, request()), timeout=WAIT_S))


async def test_a_client_learns_services_and_messages_by_reflection_and_calls_with_them(fleet: Fleet) -> None:
    services, response = await asyncio.to_thread(call_by_reflection, fleet.front.grpc_target)
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    assert response["outputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": ["2"]}]
    assert response["rawOutputContents"] == ["AADAPwAAIEA="]  # 1.5 and 2.5


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_finds_files_by_symbol_and_by_name_and_says_what_it_does_not_know(fleet: Fleet, version: str) -> None:
    """What grpcurl requests for `list`, `describe` and a call, on one stream."""
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        reflection_pb2.ServerReflectionRequest(file_by_filename="dynamo/protos/model_config.proto"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.Nothing"),
    ]
    async with grpc.aio.insecure_channel(fleet.front.grpc_target) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter(requests), timeout=WAIT_S)
        listed, by_symbol, by_name, unknown = [response async for response in call]
    assert "inference.GRPCInferenceService" in [service.name for service in listed.list_services_response.service]
    assert by_symbol.file_descriptor_response.file_descriptor_proto
    assert by_name.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
