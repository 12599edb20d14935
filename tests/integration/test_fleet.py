"""Several frontends and workers at once, several processes on one port, and requests of unusual shape and size."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dynamo.protos import inference_pb2 as pb
from tests.support.fleet import Fleet, echo_request
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S

REQUESTS = "dynamo_frontend_requests_total"


async def test_two_frontends_share_three_workers_fairly_and_count_together(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        await fleet.start(workers=3, frontends=2)
        first, second = fleet.frontends
        async with first.client() as one, second.client() as two:
            for _ in range(30):
                await asyncio.gather(*(client.infer(echo_request()) for client in (one, two) for _ in range(5)))
            ran = [(await fleet.statistics(worker)).inference_count for worker in fleet.workers]
            assert ran == [100, 100, 100]
            for client in (one, two):
                summed = await client.statistics()
                assert (summed.inference_count, summed.execution_count, summed.inference_stats.success.count) == (300, 300, 300)
            assert [await front.metric(REQUESTS, model="echo") for front in fleet.frontends] == [150, 150]

            chosen = fleet.workers[1]
            for client in (one, two):
                for _ in range(10):
                    await client.infer(echo_request(), x_dynamo_instance=chosen.instance)
            assert [(await fleet.statistics(worker)).inference_count for worker in fleet.workers] == [100, 120, 100]
            await chosen.killed()
            with pytest.raises(grpc.aio.AioRpcError) as gone:
                await one.infer(echo_request(), x_dynamo_instance=chosen.instance)
            assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
            assert chosen.instance in (gone.value.details() or "")


async def test_all_processes_of_a_frontend_finish_what_they_have_and_end_together(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        await fleet.start(workers=1, frontend_flags=("--processes", "2", "--settle-s", "0"))
        [front] = fleet.frontends
        await front.process.logged("gRPC on", times=2)
        children = serving_children(front.process.process.pid)
        assert len(children) == 2
        async with front.client() as a, front.client() as b, front.client() as c, front.client() as d:
            for client in (a, b, c, d):
                await client.infer(echo_request())
            async with asyncio.timeout(120):
                while await front.metric(REQUESTS, model="echo") != 4:  # what other processes counted is seen a bit late
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                slow = [tasks.create_task(client.infer(echo_request(delay_ms=5000))) for client in (a, b, c, d)]
                while await front.metric("dynamo_frontend_inflight_requests", model="echo") < 4:
                    await asyncio.sleep(0.02)
                front.process.terminate()
            assert [task.result().id for task in slow] == ["1"] * 4
        assert await front.process.ended() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.slow  # it kills
async def test_processes_whose_supervisor_was_killed_leave_in_order(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        await fleet.start(workers=1, frontend_flags=("--processes", "2", "--settle-s", "0"))
        [front] = fleet.frontends
        await front.process.logged("gRPC on", times=2)
        children = serving_children(front.process.process.pid)
        async with front.client() as client, asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(client.infer(echo_request(delay_ms=5000)))
            while await front.metric("dynamo_frontend_inflight_requests", model="echo") < 1:
                await asyncio.sleep(0.02)
            front.process.process.send_signal(signal.SIGKILL)
            assert (await slow).id == "1"
        async with asyncio.timeout(120):
            while any(Path(f"/proc/{pid}").exists() for pid in children):
                await asyncio.sleep(0.02)


def serving_children(pid: int) -> list[int]:
    pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in pids if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def test_large_tensors_pass_a_bus_with_default_limits(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        await fleet.start(frontend_flags=("--max-message-size", str(80 * 2**20)))
        async with fleet.frontends[0].client() as client:
            large = os.urandom(64 * 2**20)
            assert (await client.infer(echo_request(large))).raw_output_contents[0] == large
            raw = os.urandom(2**20)
            responses = await asyncio.gather(*(client.infer(echo_request(raw), WAIT_S) for _ in range(64)))
            assert all(response.raw_output_contents[0] == raw for response in responses)
        assert not any("NATS connection is lost" in line for each in fleet.processes for line in each.lines)


ODD = ["", "a" * 10_000, "naïve-模型", "a.b/c", ">", "*", "a b", "dynamo.backend.*", "../../etc", "\x00", "%2E"]


async def test_odd_names_ids_and_metadata_get_an_answer_or_a_clear_error(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace, ("--model", "echo", "--model-name", "a.b/c")) as fleet:
        await fleet.start()
        async with fleet.frontends[0].client() as client:

            async def refused(code: grpc.StatusCode, words: str, model: str = "a.b/c", **metadata: str) -> None:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await client.infer(echo_request(model=model), **metadata)
                assert error.value.code() is code, (model, metadata, error.value.details())
                assert words in (error.value.details() or "")

            for text in ODD:
                if text != "a.b/c":
                    await refused(grpc.StatusCode.NOT_FOUND, "is not found", text)
                assert (await client.infer(echo_request(model="a.b/c", id_=text))).id == text
                [message] = [response async for response in client.stream([echo_request(model=text, id_=text)])]
                assert bool(message.error_message) == (text != "a.b/c")
                assert message.infer_response.id == text
            for instance in ("", "zz", "-1", "f" * 17, "*"):
                await refused(grpc.StatusCode.INVALID_ARGUMENT, "is not an instance id", x_dynamo_instance=instance)
            await refused(grpc.StatusCode.UNAVAILABLE, "instance abc does not serve", x_dynamo_instance="abc")
            await refused(grpc.StatusCode.INVALID_ARGUMENT, "must be an integer", x_dynamo_request_priority="high")
            for value in ("", "a b", ">", "*", "a.b/c", "x" * 10_000):
                response = await client.infer(
                    echo_request(model="a.b/c"),
                    x_request_id=value,
                    traceparent=value,
                    tracestate=value,
                    x_dynamo_session=value[:128],
                )
                assert response.id == "1"
            await refused(grpc.StatusCode.INVALID_ARGUMENT, "at most 128 are taken", x_dynamo_session="x" * 129)
            index = client.channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
            models = pb.RepositoryIndexResponse.FromString(await index(b"", timeout=120)).models
            assert [model.name for model in models] == ["a.b/c"]
