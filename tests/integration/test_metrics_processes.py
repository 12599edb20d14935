"""Metrics of several frontend processes on one port: each scrape, whoever answers it, shows the sum."""

from __future__ import annotations

import asyncio

import grpc.aio
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fleet import echo_request
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer


async def total(port: int, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels, by a connection of its own: any of the processes may answer."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def becomes(port: int, value: float, name: str, **labels: str) -> None:
    async with asyncio.timeout(15):
        while await total(port, name, **labels) != value:
            await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
async def test_a_scrape_shows_what_all_processes_counted(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--processes", "2", "--grpc-server", "grpcio", "--settle-s", "0")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        await front.logged("gRPC on", times=2)
        await front.serves("echo")
        for number in range(12):
            options = [("grpc.use_local_subchannel_pool", 1), ("test.connection", number)]
            async with grpc.aio.insecure_channel(front.grpc_target, options=options) as channel:
                infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                for _ in range(4):
                    await infer(echo_request(), wait_for_ready=True, timeout=20)
        await becomes(front.http_port, 48, "dynamo_frontend_requests_total", model="echo", status="success")
        await becomes(front.http_port, 48, "grpc_server_handled_total", grpc_method="ModelInfer", grpc_code="OK")
        await becomes(front.http_port, 48, "dynamo_frontend_router_decisions_total", model="echo")
        await becomes(front.http_port, 0, "dynamo_frontend_inflight_requests", model="echo")
        assert await total(front.http_port, "dynamo_frontend_model_instances", model="echo") == 1, "a fact is no sum"
