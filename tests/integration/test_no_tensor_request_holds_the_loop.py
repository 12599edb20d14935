"""No single KServe request, over gRPC or REST, keeps a frontend from serving the others."""

from __future__ import annotations

import asyncio
import gzip
import http.client
from collections.abc import Callable
from functools import partial

import grpc
import pytest

from tests.integration.test_no_request_holds_the_loop import MAX_HOLD_S, MIB, Probe, filled
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.wire import BOMBS

INFER = "/v2/models/echo/infer"
TEN_MILLION = 10 * MIB
TENSOR = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[%d],"data":['
END = b"1]}]}"
LISTS = filled(b'{"parameters":{"a":[', b"[],", b'0]},"inputs":[]}', 60 * MIB)
BODIES: dict[str, tuple[str, bytes, str]] = {
    "numbers": (INFER, filled(TENSOR % 1, b"1,", END, 60 * MIB), ""),
    "floats": (INFER, filled(TENSOR % 1, b"0.123456789,", END, 60 * MIB), ""),
    "nested lists": (INFER, filled(TENSOR % 1, b"[],", b"[]]}]}", 60 * MIB), ""),
    "a word for a number": (INFER, filled(TENSOR % 1 + b"NaN,", b"[],", b"[]]}]}", 60 * MIB), ""),
    "parameters": (INFER, LISTS, ""),
    "inputs": (INFER, filled(b'{"inputs":[', b'{"name":"a","datatype":"FP32","shape":[0],"data":[]},', b"{}]}", 60 * MIB), ""),
    "dimensions": (
        INFER,
        filled(b'{"inputs":[{"name":"INPUT0","datatype":"FP32","data":[1],"shape":[', b"1,", END, 60 * MIB),
        "",
    ),
    "lists to generate from": ("/v2/models/echo/generate", filled(b'{"a":[', b"[],", b"0]}", 60 * MIB), ""),
    "compressed lists": (INFER, gzip.compress(LISTS, 6), "gzip"),
    "compressed spaces": (INFER, gzip.compress(b" " * (60 * MIB), 6), "gzip"),
    "a tensor": (INFER, TENSOR % TEN_MILLION + b"1," * (TEN_MILLION - 1) + END, ""),
}


def post(port: int, path: str, body: bytes, encoding: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json", **({"content-encoding": encoding} if encoding else {})}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except ConnectionError:  # refused by its length, and closed before all of it was sent
        return 413
    finally:
        connection.close()


def infer(port: int, method: str, body: bytes) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(body, timeout=60)
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("server", ["grpcio", "http2"])
async def test_no_tensor_request_holds_the_event_loop(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, server: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--grpc-server", server) as front,
    ):
        await front.serves("echo")
        held = await asyncio.to_thread(attack_grpc, front)
        if server == "grpcio":
            held |= await asyncio.to_thread(attack_rest, front)
    assert {name: seconds for name, seconds in held.items() if seconds > MAX_HOLD_S} == {}


def attack_grpc(front: FrontendProcess) -> dict[str, float]:
    held: dict[str, float] = {}
    for name, make in BOMBS.items():
        body = make()
        for method in ("ModelInfer", "RepositoryModelLoad"):
            refused = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "OK", "NOT_FOUND"}
            held[f"{method}: {name}"] = worst(
                front, lambda body=body, method=method: infer(front.grpc_port, method, body), refused
            )
    return held


def attack_rest(front: FrontendProcess) -> dict[str, float]:
    held: dict[str, float] = {}
    for name, (path, body, encoding) in BODIES.items():
        held[name] = worst(front, partial(post, front.http_port, path, body, encoding), {200, 400, 413})
    return held


def worst(front: FrontendProcess, attack: Callable[[], object], expected: set[object]) -> float:
    """How long an attack held the event loop, in seconds; the better of two, since either may have met something else."""
    probe = Probe(front.http_port, front.process.pid)
    held = 60.0
    for _ in range(2):
        with probe.watching():
            status = attack()
        assert status in expected, status
        held = min(held, probe.worst_s)
        if held <= MAX_HOLD_S:
            break
    return held
