from __future__ import annotations

import asyncio
import logging
import sys

import grpc
import grpc.aio
import pytest

from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.server import channel_arguments, serve_grpc
from dynamo.frontend.config import GrpcOptions, GrpcServerChoice
from tests.support.grpc_operations import ECHO, unary

AUTO, HTTP2, GRPCIO = GrpcServerChoice.AUTO, GrpcServerChoice.HTTP2, GrpcServerChoice.GRPCIO


async def test_a_server_that_waits_for_calls_keeps_no_message_of_the_last_ones() -> None:
    messages: list[object] = []

    async def keep(request: bytes | PendingMessage, context: object) -> bytes:
        messages.append(await read_message(request))
        return b""

    async with serve_grpc(GrpcOptions(port=0), [unary("/test.Keep/Say", keep)]) as running:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            await channel.unary_unary("/test.Keep/Say")(bytes(1000))
        async with asyncio.timeout(120):
            while sys.getrefcount(messages[0]) > 2:  # that of the list, and that of the call
                await asyncio.sleep(0.01)


def test_settings_reach_the_server_in_its_own_words() -> None:
    options = GrpcOptions(max_message_bytes=5000, max_concurrent_streams=7, keepalive_s=2.5, initial_stream_window_size=2**20)
    arguments = dict(channel_arguments(options, share_port=True))
    assert arguments["grpc.max_receive_message_length"] == arguments["grpc.max_send_message_length"] == 5000
    assert arguments["grpc.max_concurrent_streams"] == 7
    assert arguments["grpc.keepalive_time_ms"] == 2500
    assert arguments["grpc.http2.lookahead_bytes"] == 2**20
    assert arguments["grpc.so_reuseport"] == 1
    assert (arguments["grpc.keepalive_permit_without_calls"], arguments["grpc.http2.max_pings_without_data"]) == (1, 0)
    pings = GrpcOptions(keepalive_permit_without_calls=False, max_pings_without_data=3)
    arguments = dict(channel_arguments(pings, share_port=False))
    assert (arguments["grpc.keepalive_permit_without_calls"], arguments["grpc.http2.max_pings_without_data"]) == (0, 3)


@pytest.mark.parametrize(("kind", "name"), [(AUTO, "http2"), (HTTP2, "http2"), (GRPCIO, "grpcio")])
async def test_the_choice_of_the_server_is_logged_once(
    kind: GrpcServerChoice, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serve_grpc(GrpcOptions(port=0, server=kind), ECHO) as server:
        assert server.port > 0
    (line,) = [record.getMessage() for record in caplog.records if "gRPC on" in record.getMessage()]
    assert f"by the {name} server" in line


def test_of_two_windows_the_larger_counts_for_both() -> None:
    for connection, stream in ((2**20, 2**17), (2**17, 2**20), (None, 2**20), (2**20, None)):
        options = GrpcOptions(initial_connection_window_size=connection, initial_stream_window_size=stream)
        assert dict(channel_arguments(options, share_port=False))["grpc.http2.lookahead_bytes"] == 2**20
