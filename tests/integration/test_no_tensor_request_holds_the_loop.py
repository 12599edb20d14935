"""No single KServe request, over gRPC or REST, keeps a frontend from serving the others."""

from __future__ import annotations

import asyncio
import gzip
import http.client
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

from tests.integration.test_no_request_holds_the_loop import MIB, filled
from tests.support.held import MAX_HELD_S, held_s
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.wire import BOMBS, TEXTS

pytestmark = pytest.mark.slow

INFER = "/v2/models/echo/infer"
GENERATE = "/v2/models/echo/generate"
TEN_MILLION = 10 * MIB
LARGEST = 16 * MIB - 100
"""Elements of the largest request in JSON that is taken, which has as much as the largest one in binary."""
TENSOR = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[%d],"data":['
END = b"1]}]}"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def bodies() -> Iterator[tuple[str, str, bytes, str]]:
    """Yield the name, path, body and encoding of each attack; a body is made when it is due."""
    lists = filled(b'{"parameters":{"a":[', b"[],", b'0]},"inputs":[]}', 60 * MIB)
    yield "numbers", INFER, filled(TENSOR % 1, b"1,", END, 60 * MIB), ""
    yield "floats", INFER, filled(TENSOR % 1, b"0.123456789,", END, 60 * MIB), ""
    yield "nested lists", INFER, filled(TENSOR % 1, b"[],", b"[]]}]}", 60 * MIB), ""
    yield "a word for a number", INFER, filled(TENSOR % 1 + b"NaN,", b"[],", b"[]]}]}", 60 * MIB), ""
    yield "parameters", INFER, lists, ""
    yield "inputs", INFER, filled(b'{"inputs":[', b'{"name":"a","datatype":"FP32","shape":[0],"data":[]},', b"{}]}", 60 * MIB), ""
    yield (
        "dimensions",
        INFER,
        filled(b'{"inputs":[{"name":"INPUT0","datatype":"FP32","data":[1],"shape":[', b"1,", END, 60 * MIB),
        "",
    )
    yield "lists to generate from", GENERATE, filled(b'{"a":[', b"[],", b"0]}", 60 * MIB), ""
    yield "compressed lists", INFER, gzip.compress(lists, 6), "gzip"
    yield "compressed spaces", INFER, gzip.compress(b" " * (60 * MIB), 6), "gzip"
    yield "a tensor", INFER, TENSOR % TEN_MILLION + b"1," * (TEN_MILLION - 1) + END, ""
    yield "the largest tensor", INFER, TENSOR % LARGEST + b"1," * (LARGEST - 1) + END, ""
    yield "numbers at the end of the range", INFER, filled(TENSOR % 1, b"1e38,", END, 32 * MIB), ""
    yield "white space", INFER, filled(TENSOR % 1, b" ", END, 32 * MIB), ""
    yield "a long number", INFER, filled(TENSOR % 1, b"1", END, 32 * MIB), ""
    yield "a long string", INFER, filled((TENSOR % 1).replace(b"FP32", b"BYTES") + b'"', b"\\n", b'"]}]}', 32 * MIB), ""
    yield (
        "parameters at the end of the range",
        INFER,
        filled(b'{"parameters":{"a":[', b"1e308,", b'0]},"inputs":[]}', 4 * MIB),
        "",
    )
    yield "a tensor to generate from", GENERATE, filled(b'{"INPUT0":[', b"1,", b"1]}", 4 * MIB), ""
    yield "a tensor to stream", GENERATE + "_stream", filled(b'{"INPUT0":[', b"1,", b"1]}", 4 * MIB), ""


def post(port: int, path: str, body: bytes, encoding: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
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
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        try:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(body, timeout=120)
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"


async def test_no_tensor_request_holds_the_event_loop(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo", "--model", "echo:llm"),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves("echo", "echo-llm")
        held = await asyncio.to_thread(attack_grpc, front)
        held |= await asyncio.to_thread(attack_rest, front)
    assert {name: seconds for name, seconds in held.items() if seconds > MAX_HELD_S} == {}


def attack_grpc(front: FrontendProcess) -> dict[str, float]:
    held: dict[str, float] = {}
    for name, make in BOMBS.items():
        body = make()
        for method in ("ModelInfer", "RepositoryModelLoad"):
            refused = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "OK", "NOT_FOUND"}
            held[f"{method}: {name}"] = held_s(front, partial(infer, front.grpc_port, method, body), refused)
    for name, make in TEXTS.items():
        body = make()
        for streams in (False, True):
            send = partial(stream if streams else partial(infer, method="ModelInfer"), front.grpc_port, body=body)
            refused = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "OK"}
            held[f"{'ModelStreamInfer' if streams else 'ModelInfer'}: {name}"] = held_s(front, send, refused)
    return held


def stream(port: int, body: bytes) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        assert list(call(iter((body,)), timeout=120))
        return "OK"


def attack_rest(front: FrontendProcess) -> dict[str, float]:
    held: dict[str, float] = {}
    for name, path, body, encoding in bodies():
        held[name] = held_s(front, partial(post, front.http_port, path, body, encoding), {200, 400, 413})
    return held
