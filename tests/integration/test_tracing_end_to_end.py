"""A trace from the client's context over both processes to a collector."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import httpx2
import pytest

from dynamo.protos import inference_pb2 as pb
from tests.support.collector import collecting
from tests.support.fleet import echo_request
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer

FAULTY = Path(__file__).parent / "clients/models/faulty.py"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def parent(trace_id: str = TRACE, *, sampled: bool = True) -> str:
    return f"00-{trace_id}-{CALLER}-{'01' if sampled else '00'}"


async def test_a_request_leaves_one_trace_from_the_client_to_the_engine(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with collecting() as collector:
        flags = ("--otlp-endpoint", collector.url, "--trace-sample-ratio", "0", "--log-format", "json")
        models = ("--model", "sim", "--model", "echo")
        async with (
            worker(etcd_server, nats_server, namespace, *models, *flags),
            frontend(etcd_server.endpoint, nats_server.url, namespace, *flags, "--router-mode", "kv") as front,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as http,
        ):
            await front.serves("sim", "echo")
            body = {"model": "sim", "prompt": "Hello", "max_tokens": 5}

            response = await http.post("/v1/completions", json=body, headers={"traceparent": parent(), "x-request-id": "r-1"})
            assert response.status_code == 200, response.text
            names = ["dynamo-frontend/completions", "dynamo-frontend/route", "dynamo-worker/serve"]
            names += [f"dynamo-worker/{part}" for part in ("queue", "prefill", "decode")]
            spans = await collector.trace(TRACE, *names)
            request, serve = spans["dynamo-frontend/completions"], spans["dynamo-worker/serve"]
            assert request.parent_id == CALLER
            assert request.attributes["dynamo.model"] == "sim"
            assert request.attributes["dynamo.output_tokens"] == 5
            assert request.events == ("first token",)
            assert spans["dynamo-frontend/route"].parent_id == request.span_id
            route = spans["dynamo-frontend/route"].attributes
            assert str(route["dynamo.route.reason"]).startswith("kv")
            (candidate,) = json.loads(str(route["dynamo.route.explanation"]))
            assert candidate["instance"] == route["dynamo.instance"]
            assert candidate["cost"] == pytest.approx(route["dynamo.route.cost"], abs=1e-6)
            assert serve.parent_id == request.span_id
            assert serve.attributes["dynamo.request_id"] == "r-1"
            parts = [spans[f"dynamo-worker/{part}"] for part in ("queue", "prefill", "decode")]
            assert all(part.parent_id == serve.span_id for part in parts)
            assert all(part.started_ns <= part.ended_ns for part in parts)
            assert [part.started_ns for part in parts[1:]] == [part.ended_ns for part in parts[:-1]]

            channel = grpc.aio.insecure_channel(front.grpc_target)
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            over_grpc = TRACE[::-1]
            await infer(echo_request(), metadata=(("traceparent", parent(over_grpc)),))
            spans = await collector.trace(over_grpc, "dynamo-frontend/tensor", "dynamo-worker/serve", "dynamo-worker/infer")
            assert spans["dynamo-worker/serve"].parent_id == spans["dynamo-frontend/tensor"].span_id

            failing = "1" * 32
            with pytest.raises(grpc.aio.AioRpcError):
                await infer(
                    pb.ModelInferRequest(model_name="echo").SerializeToString(), metadata=(("traceparent", parent(failing)),)
                )
            spans = await collector.trace(failing, "dynamo-frontend/tensor")
            assert spans["dynamo-frontend/tensor"].failed
            assert spans["dynamo-frontend/tensor"].attributes["error.type"] == "invalid_request"
            await channel.close()

            unsampled = "2" * 32
            await http.post("/v1/completions", json=body, headers={"traceparent": parent(unsampled, sampled=False)})
            await http.post("/v1/completions", json=body)
        # Both processes have ended, and with that sent what they had.
        assert not collector.of(unsampled)
        assert {span.trace_id for span in collector.spans} == {TRACE, over_grpc, failing}


async def test_a_collector_that_is_away_harms_nothing(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    flags = ("--otlp-endpoint", "http://127.0.0.1:9", "--trace-sample-ratio", "1")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo", *flags) as backend,
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        await front.serves("echo")
        async with grpc.aio.insecure_channel(front.grpc_target) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(20):
                await infer(echo_request())
        for process in (front, backend):
            process.terminate()
            assert await process.ended() == 0


async def test_log_lines_of_both_processes_name_the_request_and_the_trace(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--log-format", "json")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", f"{FAULTY}:Faulty", *flags) as backend,
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as http,
    ):
        await front.serves("faulty")
        tensor = {"name": "how", "datatype": "BYTES", "shape": [1], "data": ["raise"]}
        headers = {"traceparent": parent(), "x-request-id": "r-7"}
        response = await http.post("/v2/models/faulty/infer", json={"inputs": [tensor]}, headers=headers)
        assert response.status_code == 500
        for process in (front, backend):
            async with asyncio.timeout(120):
                while not (lines := [line for line in process.lines if "r-7" in line]):
                    await asyncio.sleep(0.01)
            record = json.loads(lines[0])
            assert (record["request_id"], record["trace_id"]) == ("r-7", TRACE)
