"""The NATS connection over a server that errs, freezes and cuts."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.metadata import version
from pathlib import Path

import nkeys  # type: ignore[import-untyped]
import pytest
from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.nats.socket_transport import SocketTransport
from dynamo.common.options import NatsOptions
from dynamo.common.process.background import running
from tests.support.fake_nats import FakeNats, start_fake_nats
from tests.support.waiting import expiring, until


def options(fake: FakeNats, **more: object) -> NatsOptions:
    return NatsOptions(
        **{"servers": (fake.url,), "reconnect_wait_s": 0.01, "ping_interval_s": 0.05, "silence_s": 0.4, **more}  # type: ignore[arg-type]
    )


async def back(connection: Connection, fake: FakeNats, connections: int = 2) -> None:
    await asyncio.wait_for(fake.connections(connections), 120)
    await asyncio.wait_for(connection.connected(), 120)
    assert connection.is_connected


@pytest.mark.parametrize(
    "error",
    [
        "Stale Connection",
        "User Authentication Expired",
        "Authorization Violation",
        "Account Authentication Expired",
        "maximum account active connections exceeded",
        "Maximum Payload Violation",
        "Slow Consumer Detected",
        "Parser Error",
    ],
)
async def test_a_connection_comes_back_from_every_error_that_the_server_reports(error: str) -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        fake.clients[0].send(f"-ERR '{error}'".encode())
        fake.clients[0].writer.close()
        await back(connection, fake)


async def test_an_error_about_one_subject_costs_no_connection() -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        fake.clients[0].send(b"-ERR 'Permissions Violation for Publish to \"x\"'")
        await asyncio.sleep(expiring(0.1))
        assert connection.is_connected
        assert len(fake.clients) == 1


async def test_a_login_that_expired_is_renewed_with_the_credentials_of_now(tmp_path: Path) -> None:
    seeds = [nkeys.encode_seed(bytes([number]) * 32, nkeys.PREFIX_BYTE_USER) for number in (1, 2)]
    file = tmp_path / "seed"
    file.write_bytes(seeds[0])
    async with (
        start_fake_nats(auth_required=True, nonce="abc") as fake,
        connect_nats(options(fake, nkey_seed_file=str(file)), "test") as connection,
    ):
        file.write_bytes(seeds[1])
        fake.clients[0].send(b"-ERR 'User Authentication Expired'")
        fake.clients[0].writer.close()
        await back(connection, fake)
        public = [nkeys.from_seed(bytearray(seed)).public_key.decode() for seed in seeds]
        assert [client.connect["nkey"] for client in fake.clients] == public


async def test_a_file_with_credentials_that_is_being_replaced_is_waited_for(tmp_path: Path) -> None:
    seed = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER)
    file = tmp_path / "seed"
    file.write_bytes(seed)
    async with (
        start_fake_nats(auth_required=True, nonce="abc") as fake,
        connect_nats(options(fake, nkey_seed_file=str(file)), "test") as connection,
    ):
        file.write_bytes(b"")
        fake.clients[0].cut()
        await asyncio.wait_for(connection.lost(), 120)
        await asyncio.sleep(expiring(0.05))
        file.write_bytes(seed)
        await back(connection, fake)


async def test_subscriptions_are_made_again_and_messages_reach_them() -> None:
    payloads: list[bytes] = []
    came = asyncio.Event()

    def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        payloads.append(bytes(payload))
        came.set()

    returned: list[float] = []
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        connection.on_reconnect(lambda: returned.append(connection.reconnected_at))
        gone = await connection.subscribe("gone", on_message)
        await connection.subscribe("a.b", on_message)
        await gone.close()
        fake.clients[0].cut()
        await back(connection, fake)
        subscribed = [line for line in fake.clients[1].lines if line.startswith(b"SUB")]
        assert [line.split()[1] for line in subscribed] == [b"a.b"]
        fake.clients[1].send(b"MSG a.b " + subscribed[0].split()[2] + b" 5\r\nhello")
        await asyncio.wait_for(came.wait(), 120)
    assert payloads == [b"hello"]
    assert len(returned) == 1


async def test_a_subscription_that_is_cancelled_while_it_is_made_is_none() -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        subscribing = asyncio.create_task(connection.subscribe("a", lambda subject, reply, payload, no_responders: None))
        await asyncio.sleep(0)
        subscribing.cancel()
        await asyncio.wait({subscribing})
        await asyncio.wait_for(fake.received(b"UNSUB"), 120)
        fake.clients[0].cut()
        await back(connection, fake)
        assert subscribing.cancelled()
        assert not any(line.startswith(b"SUB") for line in fake.clients[1].lines)


async def test_a_message_above_the_limit_is_not_sent_and_costs_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with start_fake_nats(max_payload=1000) as fake, connect_nats(options(fake), "test") as connection:
        assert connection.max_payload == 1000
        assert not connection.publish_nowait("large", [bytes(600), bytes(401)])
        assert not connection.publish_soon("large", bytes(1001))
        assert connection.publish_nowait("small", bytes(1000))
        await asyncio.wait_for(fake.received(b"PUB small 1000"), 120)
        assert not any(b"large" in line for line in fake.clients[0].lines)
    assert sum("takes at most 1000" in record.getMessage() for record in caplog.records) == 2


async def test_without_a_connection_nothing_is_published() -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        assert connection.away_s == 0
        fake.clients[0].cut()
        await asyncio.wait_for(connection.lost(), 120)
        assert not connection.publish_nowait("a", b"x")
        assert not connection.publish_soon("a", b"x")
        assert connection.away_s > 0


@pytest.mark.parametrize("unsent", [0, 40 << 20])
async def test_a_server_that_freezes_is_left_without_waiting_for_its_socket(unsent: int) -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        fake.freeze()
        for _ in range(unsent // (1 << 19)):
            connection.publish_nowait("a", bytes(1 << 19))
        await back(connection, fake)


async def test_messages_past_the_share_of_a_turn_wait_until_others_have_run() -> None:
    received: list[int] = []
    turn, done = 0, asyncio.Event()

    def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        received.append(turn)
        if len(received) == 100:
            done.set()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with start_fake_nats() as fake, connect_nats(options(fake), "test", messages_per_turn=7) as connection:
        await connection.subscribe("a", on_message)
        (line,) = (line for line in fake.clients[0].lines if line.startswith(b"SUB"))
        async with running(count_turns(), "turns"):
            fake.clients[0].send(b"\r\n".join([b"MSG a " + line.split()[2] + b" 5\r\nhello"] * 100))
            await asyncio.wait_for(done.wait(), 120)
    assert max(received.count(each) for each in received) <= 7


async def test_a_ping_ends_when_all_that_came_before_is_handled_or_the_connection_is_lost() -> None:
    received: list[bytes] = []

    def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        received.append(bytes(payload))

    async with start_fake_nats() as fake, connect_nats(options(fake), "test", messages_per_turn=1) as connection:
        await connection.subscribe("a", on_message)
        (line,) = (line for line in fake.clients[0].lines if line.startswith(b"SUB"))
        fake.clients[0].send(b"\r\n".join([b"MSG a " + line.split()[2] + b" 5\r\nhello"] * 100))
        await asyncio.wait_for(connection.ping(), 120)
        assert len(received) == 100
        fake.freeze()
        pong = connection.ping()
        fake.clients[0].cut()
        await asyncio.wait({pong}, timeout=120)
        assert pong.cancelled()
        await back(connection, fake)
        assert await asyncio.wait_for(connection.ping(), 120)


async def test_a_cancelled_ping_does_not_disturb_the_next_one() -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        connection.ping().cancel()
        assert await asyncio.wait_for(connection.ping(), 120)
        assert connection.is_connected
        assert len(fake.clients) == 1


async def test_a_flush_of_nats_py_that_was_given_up_ends_neither_its_reading_nor_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake, silence_s=600.0), "test") as connection:
        fake.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await connection.client.flush()
        with pytest.raises(FlushTimeoutError):
            await connection.client.flush(timeout=expiring(0.01))  # type: ignore[arg-type]  # passed to asyncio.wait_for
        fake.thaw()
        await until(lambda: not vars(connection.client)["_pongs"])
        assert [record.getMessage() for record in caplog.records] == []
        assert await asyncio.wait_for(connection.ping(), 120)
        assert len(fake.clients) == 1


async def test_messages_of_a_subscription_that_ended_are_ignored() -> None:
    received: list[bytes] = []
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        subscription = await connection.subscribe("a", lambda subject, reply, payload, gone: received.append(bytes(payload)))
        (line,) = (line for line in fake.clients[0].lines if line.startswith(b"SUB"))
        await subscription.close()
        fake.clients[0].send(b"MSG a " + line.split()[2] + b" 5\r\nhello")
        assert await asyncio.wait_for(connection.ping(), 120)
    assert received == []


async def test_closing_does_not_wait_for_a_server_that_reads_no_more() -> None:
    async with asyncio.timeout(120), start_fake_nats() as fake, connect_nats(options(fake, silence_s=60.0), "test") as connection:
        fake.freeze()
        for _ in range(80):
            connection.publish_nowait("a", bytes(1 << 19))


async def test_a_process_that_hung_itself_does_not_blame_the_server() -> None:
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        time.sleep(expiring(1.0))  # noqa: ASYNC251  # as a handler might that computes for too long
        await asyncio.sleep(expiring(0.2))
        assert connection.is_connected
        assert len(fake.clients) == 1


async def test_a_server_that_owes_a_pong_makes_the_connection_silent() -> None:
    async with (
        start_fake_nats() as fake,
        connect_nats(options(fake, ping_interval_s=0.5, silence_s=60.0), "test") as connection,
    ):
        assert await asyncio.wait_for(connection.ping(), 120)
        assert not connection.is_silent
        assert connection.away_s == 0
        fake.freeze()
        await until(lambda: connection.is_silent)
        assert connection.is_connected
        assert connection.away_s > 0


async def test_the_same_reason_for_being_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with start_fake_nats() as fake:
        port = fake.port
    async with asyncio.timeout(120):
        connecting = asyncio.ensure_future(_connect(f"nats://127.0.0.1:{port}"))
        await asyncio.sleep(expiring(0.3))
        connecting.cancel()
        await asyncio.wait([connecting])
    refused = [record for record in caplog.records if "Connect call failed" in record.getMessage()]
    assert len(refused) == 1


async def _connect(url: str) -> None:
    async with connect_nats(NatsOptions(servers=(url,), reconnect_wait_s=0.01), "test"):
        pass


async def test_nats_py_uses_the_transport_that_it_is_given() -> None:
    """`Client._transport` is private: the connection sets it before `connect`, and nats-py makes none of its own then.

    So are `_pongs`, to which `Connection.ping` adds, and `_process_pong`.
    """
    assert version("nats-py") == "2.16.0", "look whether `connection` and `socket_transport` still fit, then change this line"
    async with start_fake_nats() as fake, connect_nats(options(fake), "test") as connection:
        assert isinstance(vars(connection.client)["_transport"], SocketTransport)
    assert vars(Client()).keys() >= {"_transport", "_pongs"}
    assert "_process_pong" in vars(Client)
