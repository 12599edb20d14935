"""How frontend processes start, run side by side, lose their workers, and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest

from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.frontend.app import serve_frontend
from dynamo.frontend.config import FrontendConfig, GrpcOptions, HttpOptions, PrometheusOptions
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.protos import inference_pb2 as pb
from dynamo.worker.app import open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.echo import EchoTensors
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

INFER = "/inference.GRPCInferenceService/ModelInfer"


def request(**parameters: int) -> bytes:
    made = pb.ModelInferRequest(model_name="echo", id="1")
    made.inputs.add(name="INPUT0", datatype="FP32", shape=[2])
    made.raw_input_contents.append(bytes(8))
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    return made.SerializeToString()


@asynccontextmanager
async def connected(target: str, count: int = 1) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Channels with connections of their own."""
    channels = [grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)]
    try:
        yield channels
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def infer(channel: grpc.aio.Channel, **parameters: int) -> pb.ModelInferResponse:
    data: bytes = await channel.unary_unary(INFER)(request(**parameters), timeout=120)
    return pb.ModelInferResponse.FromString(data)


class Load:
    """Requests without a pause, until told to stop."""

    def __init__(self, target: str, at_once: int = 8) -> None:
        self._target = target
        self._at_once = at_once
        self._stop = asyncio.Event()
        self.answered = 0
        self.more = asyncio.Event()
        self.failures: list[str] = []

    async def run(self) -> None:
        async with connected(self._target, 2) as channels, asyncio.TaskGroup() as tasks:
            for number in range(self._at_once):
                tasks.create_task(self._one(channels[number % 2]))

    async def _one(self, channel: grpc.aio.Channel) -> None:
        while not self._stop.is_set():
            try:
                await infer(channel)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name} {error.details()}")
            else:
                self.answered += 1
                self.more.set()

    async def until(self, count: int) -> None:
        """Returns when so many more were answered."""
        goal = self.answered + count
        async with asyncio.timeout(120):
            while self.answered < goal:
                self.more.clear()
                await self.more.wait()

    def stop(self) -> None:
        self._stop.set()


async def test_it_starts_before_etcd_and_nats_and_joins_when_they_are_there(tmp_path: Path, namespace: str) -> None:
    etcd_port, peer_port, nats_port = free_ports(3)
    del peer_port
    async with frontend(f"http://127.0.0.1:{etcd_port}", f"nats://127.0.0.1:{nats_port}", namespace) as front:
        await front.logged("HTTP on")
        status, body = await front.health()
        assert (status, body["status"], body["nats"], body["etcd"]) == (503, "starting", "connecting", "connecting")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}") as client:
            assert (await client.get("/live")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 503
        etcd, nats = EtcdServer(tmp_path / "etcd", port=etcd_port), NatsServer(tmp_path / "nats", port=nats_port)
        try:
            await asyncio.gather(etcd.start(), nats.start())
            async with worker(etcd, nats, namespace, "--model", "echo"):
                await front.serves("echo")
                async with connected(front.grpc_target) as (channel,):
                    assert (await infer(channel)).id == "1"
        finally:
            await nats.stop()
            await etcd.stop()


async def test_it_can_be_stopped_while_it_waits_for_nats(namespace: str) -> None:
    etcd_port, nats_port = free_ports(2)
    async with frontend(f"http://127.0.0.1:{etcd_port}", f"nats://127.0.0.1:{nats_port}", namespace) as front:
        await front.logged("HTTP on")
        front.terminate()
        assert await front.ended() == 0


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
async def test_a_port_that_is_taken_ends_the_start_with_a_sentence(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, flag: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dynamo.frontend", "--grpc", "--namespace", namespace, flag, port),
            *("--grpc-port" if flag == "--http-port" else "--http-port", "0"),
            *("--etcd-endpoints", etcd_server.endpoint, "--nats-servers", nats_server.url),
            stderr=asyncio.subprocess.PIPE,
        )
        _, log = await process.communicate()
    assert process.returncode == 2
    assert log.decode().splitlines()[-1].startswith("dynamo-frontend: ")
    assert port in log.decode().splitlines()[-1]
    assert "Traceback" not in log.decode()


async def test_a_drain_is_bounded(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    flags = ("--settle-s", "0", "--drain-timeout", "1")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo", "--drain-timeout", "1"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        await front.serves("echo")
        async with connected(front.grpc_target) as (channel,):
            endless = asyncio.create_task(infer(channel, delay_ms=60_000))
            await infer(channel)
            front.terminate()
            assert await front.ended() == 0
            with pytest.raises(grpc.aio.AioRpcError):
                await endless


async def test_sigterm_to_a_worker_under_load_fails_no_request(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        worker(etcd_server, nats_server, namespace, "--model", "echo") as leaving,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await leaving.logged("registered")
        await front.serves("echo")
        load = Load(front.grpc_target)
        running = asyncio.create_task(load.run())
        await load.until(500)
        leaving.terminate()
        assert await leaving.ended() == 0
        await load.until(500)
        load.stop()
        await running
        assert load.failures == []


@pytest.mark.slow
async def test_a_killed_worker_costs_no_unary_request_and_none_left_is_unavailable_at_once(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo") as last,
        worker(etcd_server, nats_server, namespace, "--model", "echo") as dying,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await dying.logged("registered")
        await front.serves("echo")
        load = Load(front.grpc_target)
        running = asyncio.create_task(load.run())
        await load.until(300)
        dying.process.kill()
        await load.until(500)
        load.stop()
        await running
        assert load.failures == []
        last.process.kill()
        await last.ended()
        async with connected(front.grpc_target) as (channel,):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details()


async def processes_of(front: FrontendProcess) -> list[int]:
    children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    serving = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return serving


async def total_requests(front: FrontendProcess) -> float:
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{front.http_port}/metrics")).text
    lines = (line for line in text.splitlines() if line.startswith("dynamo_frontend_requests_total{"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'model="echo"' in line)


@pytest.mark.slow  # one is killed
async def test_several_processes_share_the_ports_and_add_up_their_metrics(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--processes", "2", "--settle-s", "0")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        async with asyncio.timeout(120):
            while sum("gRPC on" in line for line in front.lines) < 2:
                await asyncio.sleep(0.05)
        await front.serves("echo")
        async with connected(front.grpc_target, 24) as channels:
            await asyncio.gather(*(infer(channel) for channel in channels for _ in range(5)))
        async with asyncio.timeout(120):  # each process adds what it counted to the shared files several times a second
            while (total := await total_requests(front)) < 120:
                await asyncio.sleep(0.05)
        assert total == 120

        first = await processes_of(front)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        await front.logged("starting another")
        async with asyncio.timeout(120):
            while sum("gRPC on" in line for line in front.lines) < 3:
                await asyncio.sleep(0.05)
        front.terminate()
        assert await front.ended() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in first)


@pytest.mark.slow  # five processes under load; how two frontends share three workers is in test_fleet.py
async def test_two_frontends_and_three_workers_serve_together(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    model = ("--model", "echo")
    async with (
        worker(etcd_server, nats_server, namespace, *model) as one,
        worker(etcd_server, nats_server, namespace, *model) as two,
        worker(etcd_server, nats_server, namespace, *model) as three,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as first,
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--router-mode", "random") as second,
    ):
        for started in (one, two, three):
            await started.logged("registered")
        for front in (first, second):
            await front.serves("echo")
            async with asyncio.timeout(120):
                while len((await front.health())[1]["instances"]) < 3:
                    await asyncio.sleep(0.05)
        loads = [Load(front.grpc_target) for front in (first, second)]
        async with asyncio.TaskGroup() as tasks:
            for load in loads:
                tasks.create_task(load.run())
            for load in loads:
                await load.until(300)
            for load in loads:
                load.stop()
        assert [load.failures for load in loads] == [[], []]


async def test_an_error_inside_the_program_around_it_comes_out_as_it_is(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    config = FrontendConfig(
        namespace=namespace,
        http=HttpOptions(port=0),
        nats=NatsOptions(servers=(nats_server.url,)),
        etcd=EtcdOptions(endpoints=(etcd_server.endpoint,)),
    )
    with pytest.raises(KeyError, match="mine"):
        async with serve_frontend(config):
            raise KeyError("mine")


async def test_both_sides_live_in_one_program(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    nats, etcd = NatsOptions(servers=(nats_server.url,)), EtcdOptions(endpoints=(etcd_server.endpoint,))
    config = FrontendConfig(
        namespace=namespace,
        http=HttpOptions(port=0),
        grpc=GrpcOptions(enabled=True, port=0),
        prometheus=PrometheusOptions(enabled=False),
        nats=nats,
        etcd=etcd,
    )
    async with (
        open_worker(EchoTensors(), WorkerConfig(namespace=namespace, nats=nats, etcd=etcd)),
        serve_frontend(config) as running,
    ):
        await until(running.readiness.is_ready, 120)
        assert [card.name for card in running.plane.cards(ANONYMOUS)] == ["echo"]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}") as http:
            statuses = [(await http.get(path)).status_code for path in ("/health", "/metrics")]
        assert (statuses, running.metrics_port) == ([200, 404], None), "metrics are off"
        async with connected(f"127.0.0.1:{running.grpc_port}") as (channel,):
            assert (await infer(channel)).id == "1"
