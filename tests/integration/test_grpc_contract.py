"""What a frontend does at its end with either gRPC server; the rest of the contract is in the unit tests' file of this name."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from dynamo.frontend.config import GrpcServerChoice
from tests.integration.test_kserve_grpc_life import connected, infer, request
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer


@pytest.mark.parametrize("server", [GrpcServerChoice.HTTP2, GrpcServerChoice.GRPCIO])
async def test_sigterm_reports_not_ready_first_and_finishes_running_requests(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, server: GrpcServerChoice
) -> None:
    flags = ("--grpc-server", server, "--settle-s", "5")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        await front.serves("echo")
        async with connected(front.grpc_target) as (channel,):
            await infer(channel)
            running = asyncio.create_task(infer(channel, delay_ms=7500))
            idle = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            await idle.write(request())
            await idle.read()
            front.terminate()
            await front.logged("stopping")
            status, body = await front.health()
            assert (status, body["status"]) == (503, "shutting_down")
            assert (await infer(channel)).id == "1"  # what comes meanwhile is served
            assert (await running).id == "1"
            assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        assert await front.ended() == 0
        assert not [line for line in front.lines if "Traceback" in line or "ERROR" in line]
