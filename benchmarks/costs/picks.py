"""A request of a gateway, which the endpoint picker places, to the end of its response at a pod that takes no time."""

from __future__ import annotations

import asyncio
from functools import partial

from benchmarks.costs.deployment import Fleet, Loop, Plan, open_fleet
from benchmarks.costs.edge import LATENCY_S
from benchmarks.costs.recording import Recorder
from benchmarks.costs.requests import AFTER_S, LEAST, PHASE_S, completion
from benchmarks.grpc_client import GrpcConnection, message, request_headers
from benchmarks.plain_pods import PodEngine
from dynamo.frontend.api.picker.service import PICKER_SERVICE
from dynamo.frontend.config import RouterMode
from dynamo.protos import ext_proc_pb2 as pb

PATH = "pick for a gateway"
_HEADERS = {
    ":authority": "models.example:10000",
    ":path": "/v1/completions",
    ":method": "POST",
    ":scheme": "http",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate",
    "user-agent": "client/1.0",
    "content-type": "application/json",
    "x-forwarded-proto": "http",
    "x-request-id": "4b9d5a6e-1c6f-4c1a-9a53-7c7b3f1f2d11",
}
_RESPONSE_HEADERS = {
    ":status": "200",
    "content-type": "text/event-stream",
    "date": "Fri, 27 Nov 2026 00:00:00 GMT",
    "x-envoy-upstream-service-time": "1",
}


def _sent(**parts: object) -> bytes:
    return message(pb.ProcessingRequest(**parts).SerializeToString())  # type: ignore[arg-type]


def _headers(headers: dict[str, str]) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values))


def _messages() -> tuple[bytes, bytes, bytes]:
    """Return what a gateway sends: of the request first its headers, then its body, and the headers of the response."""
    modes = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.NONE)
    body = completion("sim", 128, stream=True).encoded().partition(b"\r\n\r\n")[2]
    return (
        _sent(request_headers=_headers(_HEADERS), protocol_config=modes),
        _sent(request_body=pb.HttpBody(body=body, end_of_stream=True)),
        _sent(response_headers=_headers(_RESPONSE_HEADERS)),
    )


async def count_picks(loop: Loop, recorder: Recorder) -> None:
    """Count a request in the mode `kv`, all of one connection, one after the other and sixteen at once."""
    for clients in (1, 16):
        name = f"{PATH}, c{clients}"
        if recorder.wants(name):
            plan = Plan([partial(PodEngine, "10.0.0.1:8000")], ("sim",), mode=RouterMode.KV, picker=True)
            async with open_fleet(loop, recorder.count, plan) as fleet:
                await asyncio.sleep(-loop.time() % PHASE_S)
                await _count(fleet, recorder, name, clients)


async def _count(fleet: Fleet, recorder: Recorder, name: str, clients: int) -> None:
    assert fleet.frontend.picker_port is not None
    gateway = GrpcConnection()
    fleet.loop.dial(fleet.frontend.picker_port, gateway)
    call, (headers, body, response) = request_headers(f"/{PICKER_SERVICE}/Process", "localhost"), _messages()
    rows = max(1, LEAST // clients)

    async def one() -> None:
        stream = gateway.begin(call)
        gateway.send(stream, headers)
        gateway.send(stream, body)
        await asyncio.sleep(8 * LATENCY_S)
        if stream.messages != 2:
            raise RuntimeError(f"{stream.messages} messages place a request: {stream.detail}")
        gateway.send(stream, response)
        await asyncio.sleep(4 * LATENCY_S)
        gateway.send(stream, b"", ends=True)
        await stream.done
        if stream.status or stream.messages != 3:
            raise RuntimeError(f"{stream.status} {stream.detail}, {stream.messages} messages")

    async def once() -> None:
        for _ in range(rows):
            await asyncio.gather(*(one() for _ in range(clients)))
            await asyncio.sleep(AFTER_S)

    await recorder.record(name, once, times=rows * clients)
