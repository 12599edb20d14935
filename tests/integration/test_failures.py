"""What clients see when parts of a running deployment die, hang or go away: real processes, real servers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dynamo.protos import inference_pb2 as pb
from tests.support.processes import FrontendProcess, Process, frontend, worker
from tests.support.servers import EtcdServer, NatsServer, start_etcd, start_nats

SERVICE = "/inference.GRPCInferenceService/"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def echo_request(raw: bytes = bytes(8), *, model: str = "echo", id_: str = "1") -> bytes:
    request = pb.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[len(raw) // 4])
    request.raw_input_contents.append(raw)
    return request.SerializeToString()


def text_request(prompt: str, tokens: int, model: str = "sim") -> bytes:
    request = pb.ModelInferRequest(model_name=model, id="t")
    for name, datatype, value in (("text_input", "BYTES", prompt.encode()), ("streaming", "BOOL", True)):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
        if isinstance(value, bytes):
            tensor.contents.bytes_contents.append(value)
        else:
            tensor.contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = tokens
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["seed"].int64_param = 7
    return request.SerializeToString()


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._infer = channel.unary_unary(SERVICE + "ModelInfer")
        self._stream = channel.stream_stream(SERVICE + "ModelStreamInfer")

    async def infer(self, request: bytes, timeout_s: float = 30.0, **metadata: str) -> pb.ModelInferResponse:
        headers = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return pb.ModelInferResponse.FromString(await self._infer(request, timeout=timeout_s, metadata=headers))

    async def text(self, request: bytes, started: asyncio.Event | None = None) -> tuple[str, str]:
        """The whole text of one stream, and why it ended."""

        async def once() -> AsyncIterator[bytes]:
            yield request

        text, reason = "", ""
        async for data in self._stream(once(), timeout=60.0):
            message = pb.ModelStreamInferResponse.FromString(data)
            assert not message.error_message, message.error_message
            found = {
                output.name: output.contents.bytes_contents[0].decode()
                for output in message.infer_response.outputs
                if output.contents.bytes_contents
            }
            text += found.get("text_output", "")
            reason = found.get("finish_reason", "") or reason
            if started is not None:
                started.set()
        return text, reason


@asynccontextmanager
async def client_of(process: FrontendProcess) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(process.grpc_target, options=UNLIMITED) as channel:
        yield Client(channel)


@asynccontextmanager
async def two_workers(
    etcd: EtcdServer, nats: NatsServer, namespace: str, *flags: str
) -> AsyncIterator[tuple[FrontendProcess, Process, Process, Client]]:
    async with (
        worker(etcd, nats, namespace, *flags) as first,
        worker(etcd, nats, namespace, *flags) as second,
        frontend(etcd.endpoint, nats.url, namespace) as front,
        client_of(front) as client,
    ):
        await first.logged("serving")
        await second.logged("serving")
        yield front, first, second, client


async def test_streams_of_a_killed_worker_go_on_elsewhere_without_a_seam(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--model", "sim:blocks=4000,speedup=4,seed=3")
    async with two_workers(etcd_server, nats_server, namespace, *flags) as (front, first, _, client):
        await front.serves("sim")
        expected = [await client.text(text_request(f"prompt {number}", 150)) for number in range(4)]
        begun = [asyncio.Event() for _ in expected]
        running = [
            asyncio.ensure_future(client.text(text_request(f"prompt {number}", 150), begun[number])) for number in range(4)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        first.process.kill()
        assert await asyncio.gather(*running) == expected
        assert all(reason == "length" for _, reason in expected)


async def test_a_hung_worker_costs_time_but_no_request(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with two_workers(etcd_server, nats_server, namespace, "--model", "echo") as (front, first, _, client):
        await front.serves("echo")
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(client.infer(echo_request(), 40.0) for _ in range(6)))
            assert all(answer.raw_output_contents[0] == bytes(8) for answer in answers)
        finally:
            os.kill(first.process.pid, signal.SIGCONT)


async def test_nats_away_for_two_seconds_fails_no_request_that_has_time(
    etcd_server: EtcdServer, tmp_path: Path, namespace: str
) -> None:
    async with (
        start_nats(tmp_path) as nats,
        two_workers(etcd_server, nats, namespace, "--model", "echo") as (front, _, _, client),
    ):
        await front.serves("echo")
        stop = asyncio.Event()
        answered = 0

        async def ask() -> None:
            nonlocal answered
            while not stop.is_set():
                await client.infer(echo_request())
                answered += 1

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(ask())
            await nats.stop()
            hasty = asyncio.ensure_future(client.infer(echo_request(), 0.3))
            await asyncio.sleep(2.0)  # the outage itself
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await hasty
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await nats.restart()
            before = answered
            while answered < before + 50:
                await asyncio.sleep(0.01)
            stop.set()


async def test_etcd_away_fails_nothing_and_who_starts_meanwhile_joins(
    nats_server: NatsServer, tmp_path: Path, namespace: str
) -> None:
    async with (
        start_etcd(tmp_path) as etcd,
        worker(etcd, nats_server, namespace, "--model", "echo") as first,
        frontend(etcd.endpoint, nats_server.url, namespace) as front,
        client_of(front) as client,
    ):
        await front.serves("echo")
        await etcd.stop()
        for _ in range(50):
            await client.infer(echo_request())
        async with (
            worker(etcd, nats_server, namespace, "--model", "echo:late=FP32[-1]", "--model-name", "late") as late,
            frontend(etcd.endpoint, nats_server.url, namespace) as second,
        ):
            await late.logged("serving late")
            status, detail = await front.health()
            assert (status, detail["status"]) == (200, "healthy"), detail
            await etcd.restart()
            await front.serves("echo", "late")
            await second.serves("echo", "late")
            async with client_of(second) as other:
                await other.infer(echo_request())
        assert first.process.returncode is None


async def test_large_tensors_pass_a_bus_with_default_limits(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--max-message-size", str(80 * 2**20))
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
        client_of(front) as client,
    ):
        await front.serves("echo")
        large = os.urandom(64 * 2**20)
        assert (await client.infer(echo_request(large))).raw_output_contents[0] == large
        raw = os.urandom(2**20)
        answers = await asyncio.gather(*(client.infer(echo_request(raw), 60.0) for _ in range(64)))
        assert all(answer.raw_output_contents[0] == raw for answer in answers)


ODD = ["", "a" * 10_000, "naïve-模型", "a.b/c", ">", "*", "a b", "dynamo.backend.*", "../../etc", "\x00", "%2E"]


async def test_odd_names_and_ids_get_an_answer_or_a_clear_error(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo", "--model-name", "a.b/c"),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        client_of(front) as client,
    ):
        await front.serves("a.b/c")
        for text in ODD:
            if text != "a.b/c":
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await client.infer(echo_request(model=text))
                assert refused.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
                assert refused.value.details()
            assert (await client.infer(echo_request(model="a.b/c", id_=text))).id == text
        for instance in ("", "zz", "-1", "f" * 17, "*"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.infer(echo_request(model="a.b/c"), x_dynamo_instance=instance)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, instance
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await client.infer(echo_request(model="a.b/c"), x_dynamo_instance="abc")
        assert absent.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "abc" in (absent.value.details() or "")
