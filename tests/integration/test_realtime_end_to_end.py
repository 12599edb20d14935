"""Conversations over WebSockets pass through the fleet to servers that have them, with the client of OpenAI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dynamo.frontend.security.keys import Limits, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.realtime_server import RealtimeServer
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S, until


@dataclass
class Fleet:
    front: FrontendProcess
    servers: list[RealtimeServer]

    def client(self, key: str = "none") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{self.front.http_port}/v1", api_key=key, max_retries=0)

    def socket(self, path: str = "/v1/realtime?model=omni", **options: Any) -> connect:
        return connect(f"ws://127.0.0.1:{self.front.http_port}{path}", max_size=None, proxy=None, **options)


@asynccontextmanager
async def fleet(etcd: EtcdServer, nats: NatsServer, namespace: str, *options: str, servers: int = 1) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        running = [await enter(RealtimeServer().serving()) for _ in range(servers)]
        urls = [option for server in running for option in ("--url", server.url)]
        await enter(worker(etcd, nats, namespace, *urls, "--remote-kind", "relay", "--model-name", "omni"))
        await enter(worker(etcd, nats, namespace, "--model", "echo:llm"))
        front = await enter(frontend(etcd.endpoint, nats.url, namespace, *options))
        await front.serves("omni", "echo-llm")
        yield Fleet(front, running)


async def received(socket: Any) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        event: dict[str, Any] = json.loads(await socket.recv())
        return event


async def closed(socket: Any) -> tuple[int, str]:
    async with asyncio.timeout(WAIT_S):
        await socket.wait_closed()
    return socket.close_code, socket.close_reason


async def test_the_client_of_openai_talks_with_a_server_and_both_ends_are_told_that_it_is_over(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace, servers=2) as running, running.client() as openai:
        async with openai.realtime.connect(model="omni") as talk:
            assert (await talk.recv()).type == "session.created"
            await talk.session.update(session={"type": "realtime", "instructions": "Be brief."})
            assert (await talk.recv()).type == "session.updated"
            audio = "A" * (3 << 20)  # more than a message of the bus
            for _ in range(3):
                await talk.input_audio_buffer.append(audio=audio)
                committed = await talk.recv()
                assert committed.type == "input_audio_buffer.committed" and committed.item_id == str(len(audio))
            await talk.response.create()
            said = [await talk.recv() for _ in range(3)]
            assert [event.type for event in said] == ["response.output_text.delta"] * 2 + ["response.done"]
        [server] = [each for each in running.servers if each.paths]
        assert server.paths == ["/v1/realtime?model=%2Fmodels%2Fomni"]
        async with asyncio.timeout(WAIT_S):
            assert (await server.closed.get())[0] == 1000
        assert [event["type"] for event in server.events][:2] == ["session.update", "input_audio_buffer.append"]

        async with running.socket() as socket:
            await received(socket)
            await socket.send('{"type":"leave"}')
            assert await closed(socket) == (1000, "good night")


async def test_what_cannot_be_a_conversation_is_refused_before_or_while_it_is_one(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace) as running:
        [server] = running.servers
        refused: dict[str, tuple[str, dict[str, Any], int]] = {
            "another kind of model": ("/v1/realtime?model=echo-llm", {}, 400),
            "no such model": ("/v1/realtime?model=nowhere", {}, 404),
            "a page of another site": ("/v1/realtime?model=omni", {"origin": "http://evil.example"}, 403),
        }
        for what, (path, options, status) in refused.items():
            with pytest.raises(InvalidStatus) as failure:
                async with running.socket(path, **options):
                    pass
            assert failure.value.response.status_code == status, what
        assert not server.paths
        server.refusals = [422]
        with pytest.raises(InvalidStatus) as failure:
            async with running.socket():
                pass
        assert (failure.value.response.status_code, failure.value.response.body) == (422, b'{"error":{"message":"no"}}')

        async with running.socket() as socket:
            await received(socket)
            await socket.send('{"type":"session.update","session":{"type":"realtime","model":"omni"}}')
            assert (await received(socket))["session"]["model"] == "/models/omni"
            await socket.send('{"type":"session.update","session":{"type":"realtime","model":"other"}}')
            event = await received(socket)
            assert event["type"] == "error" and "with the model 'omni'" in event["error"]["message"]
            assert (await closed(socket))[0] == 1008
        for message, code in ((b"\x00", 1003), ("a" * ((16 << 20) + 1), 1009)):
            async with running.socket() as socket:
                await received(socket)
                with suppress(ConnectionClosed):  # before all of it is sent
                    await socket.send(message)
                assert (await closed(socket))[0] == code
        await until(lambda: server.open == 0)


async def test_a_side_that_is_lost_ends_the_conversation_at_the_other(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace) as running:
        [server] = running.servers
        socket = await running.socket()
        await received(socket)
        assert server.open == 1
        socket.transport.abort()
        async with asyncio.timeout(WAIT_S):
            await server.closed.get()
        assert server.open == 0

        async with running.socket(additional_headers={"x-request-timeout-ms": "2000"}) as short:
            await received(short)
            assert (await received(short))["error"]["code"] == "deadline_exceeded"
            assert (await closed(short))[0] == 1001
        await until(lambda: server.open == 0)


async def test_a_conversation_counts_for_its_key_as_one_request_and_by_the_tokens_that_the_server_counts(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    key, file = make_key(), tmp_path / "keys.yaml"
    limits = Limits(tokens_per_minute=60, concurrent_requests=1)
    file.write_text(entry_for(key, "talker", scopes=[Scope.INFER, Scope.METRICS], models=["omni"], limits=limits))
    async with fleet_with_keys(etcd_server, nats_server, namespace, file, key) as running:
        headers = {"authorization": f"Bearer {key}"}
        for wrong, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401)):
            with pytest.raises(InvalidStatus) as failure:
                async with running.socket(additional_headers=wrong):
                    pass
            assert failure.value.response.status_code == status
        async with running.client(key) as openai, openai.realtime.connect(model="omni") as talk:
            await talk.recv()
            with pytest.raises(InvalidStatus) as failure:
                async with running.socket(additional_headers=headers):
                    pass
            assert failure.value.response.status_code == 429
            for _ in range(2):
                await talk.response.create()
                events = [await talk.recv() for _ in range(3)]
            assert events[-1].type == "response.done"
            await talk.response.create()  # 84 tokens of 60 are gone
            event = await talk.recv()
            assert event.type == "error" and "tokens per minute" in event.error.message
        [server] = running.servers
        await until(lambda: server.open == 0)
        assert [event["type"] for event in server.events] == ["response.create"] * 2


@asynccontextmanager
async def fleet_with_keys(etcd: EtcdServer, nats: NatsServer, namespace: str, file: Path, key: str) -> AsyncIterator[Fleet]:
    async with RealtimeServer().serving() as server:
        url = ("--url", server.url, "--remote-kind", "relay", "--model-name", "omni")
        async with (
            worker(etcd, nats, namespace, *url),
            frontend(etcd.endpoint, nats.url, namespace, "--api-keys-file", str(file)) as front,
        ):
            await front.serves("omni", key=key)
            yield Fleet(front, [server])
