"""What clients see when workers and frontends die, hang or leave under load: real processes, real servers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.fleet import Client, Fleet, FleetWorker, Text, connect, echo_request, text_request
from tests.support.gate import GATE, open_gate
from tests.support.servers import EtcdServer, NatsServer

pytestmark = pytest.mark.slow

SIM = ("--model", "sim:blocks=4000,speedup=4,seed=3")
MIGRATIONS = "dynamo_frontend_model_migration_total"
RETRIES = "dynamo_frontend_retries_total"


async def test_streams_of_a_killed_worker_go_on_elsewhere_without_a_seam(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace, SIM) as fleet:
        await fleet.start(workers=2)
        [front] = fleet.frontends
        async with front.client() as client:
            requests = [text_request(f"prompt {number}", 200) for number in range(6)]
            expected = [await client.text(request) for request in requests]
            running = [Text() for _ in requests]
            async with asyncio.TaskGroup() as tasks:
                for request, text in zip(requests, running, strict=True):
                    tasks.create_task(client.text(request, text))
                await asyncio.gather(*(text.at_least(5) for text in running))
                fleet.workers[0].kill()
            assert [text.text for text in running] == [text.text for text in expected]
            assert {text.reason for text in running} == {"length"}
        assert 0 < await front.metric(MIGRATIONS) < 6
        survivor = await fleet.statistics(fleet.workers[1], "sim")
        assert survivor.response_stats["0"].fail.count == 0


async def test_requests_held_by_a_killed_worker_are_answered_by_another(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        await fleet.start(workers=3)
        async with fleet.frontends[0].client() as client:
            async with client.load(24, lambda number: echo_request(number.to_bytes(8, "little"), delay_ms=40)) as load:
                for dying in fleet.workers[:2]:
                    await load.completed(100)
                    dying.kill()
                await load.completed(200)
            assert load.failures == []
        assert 0 < await fleet.frontends[0].metric(RETRIES) <= 2 * 24


async def test_a_dead_worker_is_tried_once_and_with_none_left_requests_are_refused_before_their_deadline(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        for _ in range(3):
            await fleet.add_worker("--lease-ttl-s", "60")  # so that etcd has nothing to do with it
        await fleet.start(workers=0)
        [front] = fleet.frontends
        async with front.client() as client:
            for _ in fleet.workers:
                await client.infer(echo_request())  # one that never responded might still be connecting

            async def kill(dying: FleetWorker) -> None:
                # Longer than changes of the fleet are collected for: the mark of the dead worker counts at once.
                await client.infer(echo_request(delay_ms=100))
                await dying.killed()

            for dying, tries in zip(fleet.workers[:2], (1, 2), strict=True):
                await kill(dying)
                for _ in range(30):
                    await client.infer(echo_request())
                assert await front.metric(RETRIES) == tries
            await kill(fleet.workers[2])
            sentences = []
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await client.infer(echo_request())
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                sentences.append(refused.value.details())
            assert sentences[0] == f"instance {fleet.workers[2].instance} is gone"
            assert sentences[1] == "no instance is serving model 'echo' now"
            [message] = [message async for message in client.stream([echo_request()])]
            assert message.error_message == "no instance is serving model 'echo' now"


async def test_a_worker_that_leaves_under_load_hands_over_everything(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace, ("--model", "echo", *SIM)) as fleet:
        await fleet.start(workers=2, frontends=2)
        leaving, staying = fleet.workers
        async with fleet.frontends[0].client() as client, fleet.frontends[1].client() as other:
            texts = [Text() for _ in range(4)]
            async with client.load() as load, other.load() as more, asyncio.TaskGroup() as tasks:
                for text in texts:
                    tasks.create_task(other.text(text_request("a long story", 200), text))
                await load.completed(100)
                await asyncio.gather(*(text.at_least(2) for text in texts))
                leaving.process.terminate()
                assert await leaving.process.ended() == 0
                await load.completed(100)
                await more.completed(100)
            assert load.failures == more.failures == []
            assert all(text.reason == "length" for text in texts)
        assert await fleet.frontends[1].metric(MIGRATIONS) == 0  # the streams it had were finished where they were
        await fleet.frontends[0].sees(staying)


async def test_a_frontend_that_leaves_under_load_finishes_what_it_has_and_takes_nothing_new(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    async with Fleet(etcd_server, nats_server, namespace, ("--model", "echo", *SIM, *GATE)) as fleet:
        await fleet.start(workers=1, frontends=2, frontend_flags=("--settle-s", "1"))
        leaving, staying = fleet.frontends
        async with leaving.client() as old, connect(leaving.target, staying.target) as both:
            text = Text()
            async with both.load(8) as load, asyncio.TaskGroup() as tasks:
                slow = tasks.create_task(old.infer(echo_request(model="gate", until=str(gate))))
                tasks.create_task(old.text(text_request("a long story", 400), text))
                await text.at_least(2)
                await load.completed(100)
                leaving.process.terminate()
                await leaving.process.logged("stopping")
                status, health = await leaving.process.health()
                assert (status, health["status"]) == (503, "shutting_down")
                await leaving.process.logged("draining")
                async with leaving.client() as late, asyncio.timeout(120):
                    # The port closes a moment after the word in the log.
                    assert await refusal_of_one(late) is grpc.StatusCode.UNAVAILABLE
                await load.completed(100)
                assert not slow.done()
                open_gate(gate)
            assert (await slow).id == "1"
            assert text.reason == "length"
            assert await leaving.process.ended() == 0
            async with both.load() as after:
                await after.completed(100)
            assert after.failures == []
        codes = {failure.partition(":")[0] for failure in load.failures}
        assert codes <= {"UNAVAILABLE"}  # which clients may retry


async def test_a_hung_worker_costs_no_request_gets_no_more_and_repeats_nothing_when_it_wakes(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with Fleet(etcd_server, nats_server, namespace, ("--model", "echo", *SIM)) as fleet:
        await fleet.start(workers=2)
        hung, healthy = fleet.workers
        [front] = fleet.frontends
        async with front.client() as client:
            story = text_request("a long story", 200)
            expected = (await client.text(story)).text
            texts = [Text(), Text()]
            async with asyncio.TaskGroup() as tasks:
                for text in texts:
                    tasks.create_task(client.text(story, text))
                await asyncio.gather(*(text.at_least(5) for text in texts))
                fleet.pause(hung.pid)
                await asyncio.gather(*(client.infer(echo_request()) for _ in range(20)))
            assert [text.text for text in texts] == [expected] * 2
            retries = await front.metric(RETRIES)
            assert retries > 0
            await asyncio.gather(*(client.infer(echo_request()) for _ in range(20)))
            assert await front.metric(RETRIES) == retries
            served = (await fleet.statistics(healthy)).inference_count
            assert served == 40
            fleet.resume(hung.pid)
            woken = await fleet.statistics(hung)  # responds after all that was waiting for it
            assert woken.inference_count == 0
            assert woken.response_stats["0"].cancel.count == 0
            assert (await fleet.statistics(hung, "sim")).response_stats["0"].success.count <= 1


async def refusal_of_one(client: Client) -> grpc.StatusCode:
    """Send one request after the other, until one fails; return its status."""
    while True:
        try:
            await client.infer(echo_request())
        except grpc.aio.AioRpcError as error:
            return error.code()
