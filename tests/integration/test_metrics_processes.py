"""Metrics of several frontend processes on one port: each scrape, by whichever process it is answered, shows the sum."""

from __future__ import annotations

import asyncio
import os
import resource
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc.aio
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.process.ports import free_ports
from dynamo.protos import inference_pb2 as pb
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
    async with asyncio.timeout(120):
        while await total(port, name, **labels) != value:
            await asyncio.sleep(0.05)


async def memory_call(target: str, method: str, key: str) -> bytes:
    """Call a method about shared memory of clients on a connection of its own, which any of the processes accepts."""
    request = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=1).SerializeToString()
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/SystemSharedMemory{method}")
        return bytes(await call(request if method == "Register" else b"", wait_for_ready=True, timeout=120))


def children_of(pid: int) -> list[int]:
    """The processes that a supervisor has spawned to serve."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cpu_s(pid: int) -> float:
    """Return the CPU time as user and system, which follow the command's name and nine other fields."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_scrape_shows_what_all_processes_counted(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    [metrics_port] = free_ports(1)
    flags = ("--processes", "2", "--settle-s", "0")
    flags += ("--prometheus-port", str(metrics_port), "--grafana-folder", str(tmp_path))
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
                    await infer(echo_request(), wait_for_ready=True, timeout=120)
        await becomes(front.http_port, 48, "dynamo_frontend_requests_total", model="echo", status="success")
        await becomes(front.http_port, 48, "grpc_server_handled_total", grpc_method="ModelInfer", grpc_code="OK")
        await becomes(front.http_port, 48, "dynamo_frontend_router_decisions_total", model="echo")
        await becomes(front.http_port, 0, "dynamo_frontend_inflight_requests", model="echo")
        await becomes(metrics_port, 48, "dynamo_frontend_requests_total", model="echo", status="success")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{metrics_port}") as http:
            statuses = [(await http.get(path)).status_code for path in ("/live", "/health", "/v1/models")]
        assert statuses == [200, 200, 404], "that port is for monitoring alone"
        assert (tmp_path / "dashboards" / "kserve.json").exists()
        assert await total(front.http_port, "dynamo_frontend_model_instances", model="echo") == 1, "a fact is no sum"

        children = children_of(front.process.pid)
        assert len(children) == 2
        assert await total(front.http_port, "process_resident_memory_bytes") == pytest.approx(
            sum(memory_bytes(pid) for pid in children), rel=0.1
        )
        assert await total(front.http_port, "process_open_fds") > max(
            len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in children
        )
        before = sum(cpu_s(pid) for pid in children)
        used = await total(front.http_port, "process_cpu_seconds_total")
        rounding = 1e-6
        assert before - rounding <= used <= sum(cpu_s(pid) for pid in children) + rounding
        assert await total(front.http_port, "python_info") == 1

        memory = SharedMemory(create=True, size=1)
        try:
            for method, is_registered in (
                ("Register", None),
                *[("Status", True)] * 6,
                ("Unregister", None),
                *[("Status", False)] * 6,
            ):
                response = await memory_call(front.grpc_target, method, memory.name)
                assert is_registered is None or (memory.name.encode() in response) is is_registered, "it is of all processes"
        finally:
            memory.close()
            memory.unlink()
