from __future__ import annotations

import asyncio
import logging
import socket
import sys
import zlib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme

from benchmarks.grpc_client import connect, message, request_headers
from dynamo.common.config import ConfigError
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.server import channel_arguments, serve_grpc
from dynamo.frontend.config import GrpcCompression, GrpcOptions, GrpcServerChoice

AUTO, HTTP2, GRPCIO = GrpcServerChoice.AUTO, GrpcServerChoice.HTTP2, GrpcServerChoice.GRPCIO
BOTH = pytest.mark.parametrize("kind", [HTTP2, GRPCIO])


async def echo(request: bytes | PendingMessage, context: object) -> bytes:
    return await read_message(request)


SERVICES = {"test.Echo": {"Say": grpc.unary_unary_rpc_method_handler(echo)}}


@pytest.mark.parametrize("server", [HTTP2, GRPCIO])
async def test_a_server_that_waits_for_calls_keeps_no_message_of_the_last_ones(server: GrpcServerChoice) -> None:
    messages: list[object] = []

    async def keep(request: bytes | PendingMessage, context: object) -> bytes:
        messages.append(await read_message(request))
        return b""

    services = {"test.Keep": {"Say": grpc.unary_unary_rpc_method_handler(keep)}}
    async with serve_grpc(GrpcOptions(port=0, server=server), services) as running:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            await channel.unary_unary("/test.Keep/Say")(bytes(1000))
        async with asyncio.timeout(5):
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
    async with serve_grpc(GrpcOptions(port=0, server=kind), SERVICES) as server:
        assert server.port > 0
    (line,) = [record.getMessage() for record in caplog.records if "gRPC on" in record.getMessage()]
    assert f"by the {name} server" in line


@BOTH
async def test_a_port_that_is_taken_is_a_configuration_error(kind: GrpcServerChoice) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot be opened|cannot listen on"):
            async with serve_grpc(GrpcOptions(port=taken.getsockname()[1], server=kind), SERVICES):
                pass


@BOTH
async def test_two_servers_share_a_port_if_configured(kind: GrpcServerChoice) -> None:
    options = GrpcOptions(port=0, server=kind)
    async with (
        serve_grpc(options, SERVICES, share_port=True) as first,
        serve_grpc(replace(options, port=first.port), SERVICES, share_port=True) as second,
    ):
        assert second.port == first.port


@BOTH
@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_accepts_clients_with_the_right_certificates(tmp_path: Path, mutual: bool, kind: GrpcServerChoice) -> None:
    ca = trustme.CA()
    server, client = ca.issue_cert("localhost"), ca.issue_cert("client")
    cert, key, roots = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    server.private_key_pem.write_to_path(str(key))
    ca.cert_pem.write_to_path(str(roots))
    options = GrpcOptions(
        port=0, server=kind, tls_cert_file=str(cert), tls_key_file=str(key), tls_client_ca_file=str(roots) if mutual else None
    )
    with_key = grpc.ssl_channel_credentials(
        ca.cert_pem.bytes(), client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    )
    without_key = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    async with serve_grpc(options, SERVICES) as running:

        async def say(credentials: grpc.ChannelCredentials) -> bytes:
            async with grpc.aio.secure_channel(f"localhost:{running.port}", credentials) as channel:
                response: bytes = await channel.unary_unary("/test.Echo/Say")(b"hello", timeout=3.0)
                return response

        assert await say(with_key) == b"hello"
        if mutual:
            with pytest.raises(grpc.aio.AioRpcError):
                await say(without_key)
        else:
            assert await say(without_key) == b"hello"


@BOTH
async def test_a_certificate_that_is_missing_is_a_configuration_error(tmp_path: Path, kind: GrpcServerChoice) -> None:
    options = GrpcOptions(port=0, server=kind, tls_cert_file=str(tmp_path / "no"), tls_key_file=str(tmp_path / "no"))
    with pytest.raises(ConfigError):
        async with serve_grpc(options, SERVICES):
            pass


@BOTH
async def test_calls_to_methods_that_do_not_exist_are_unimplemented(kind: GrpcServerChoice) -> None:
    async with (
        serve_grpc(GrpcOptions(port=0, server=kind), SERVICES) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):

        async def ask(path: str) -> grpc.StatusCode:
            try:
                await channel.unary_unary(path)(b"", timeout=5.0)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        found = await asyncio.gather(*(ask(path) for path in ("/test.Echo/Nothing", "/no.Service/At", "/x", "/test.Echo/Say")))
        assert found == [grpc.StatusCode.UNIMPLEMENTED] * 3 + [grpc.StatusCode.OK]


async def test_a_path_that_is_not_utf_8_does_not_stop_the_server_that_replaces_parts_of_grpcio() -> None:
    assert version("grpcio") == "1.85.1", (
        "look whether `api/rpc/hardening.py` still fits, then change this line and pyproject.toml"
    )
    async with serve_grpc(GrpcOptions(port=0, server=GRPCIO), SERVICES) as server:
        connection = await connect("127.0.0.1", server.port)
        async with asyncio.timeout(10):
            headers = request_headers("/test.Echo/Say", "localhost")
            refused = connection.call(headers.replace(b"Say", b"S\xffy"), message(b""), keep=True)
            await refused.done
            served = connection.call(headers, message(b"hello"), keep=True)
            await served.done
        connection.close()
    assert refused.status != 0
    assert (served.status, bytes(served.body or b"")[5:]) == (0, b"hello")


# Compressed responses, read as they are on the wire


def wire_headers(accepted: str) -> bytes:
    """Of a call to `echo` by a client that takes responses in these encodings; `benchmarks.grpc_client` adds the rest."""
    headers = request_headers("/test.Echo/Say", "localhost")
    if accepted:
        name = b"grpc-accept-encoding"
        headers += b"\x00" + bytes((len(name),)) + name + bytes((len(accepted),)) + accepted.encode()
    return headers


async def raw_answer(options: GrpcOptions, payload: bytes, accepted: str) -> tuple[int, bytes]:
    """The flag of the response's gRPC prefix, and the message behind it."""
    async with serve_grpc(options, SERVICES) as server:
        connection = await connect("127.0.0.1", server.port)
        async with asyncio.timeout(10):
            reply = connection.call(wire_headers(accepted), message(payload), keep=True)
            await reply.done
        connection.close()
    assert (reply.status, reply.messages) == (0, 1), reply.detail
    assert reply.body is not None
    assert int.from_bytes(reply.body[1:5], "big") == len(reply.body) - 5
    return reply.body[0], bytes(reply.body[5:])


@BOTH
@pytest.mark.parametrize(
    ("compression", "wbits"), [(GrpcCompression.GZIP, 31), (GrpcCompression.DEFLATE, 15)], ids=["gzip", "deflate"]
)
async def test_a_response_is_compressed_for_a_client_that_accepts_it(
    compression: GrpcCompression, wbits: int, kind: GrpcServerChoice
) -> None:
    payload = b"the same again, " * 4096
    options = GrpcOptions(port=0, server=kind, compression=compression)
    flag, body = await raw_answer(options, payload, "identity,deflate,gzip")
    assert flag == 1
    assert len(body) < len(payload) / 50
    assert zlib.decompress(body, wbits) == payload  # 31: gzip's header is demanded, 15: zlib's


@BOTH
@pytest.mark.parametrize(
    ("compression", "accepted"),
    [(GrpcCompression.GZIP, ""), (GrpcCompression.GZIP, "identity"), (GrpcCompression.NONE, "identity,deflate,gzip")],
)
async def test_a_response_is_not_compressed_unless_both_sides_want_it(
    compression: GrpcCompression, accepted: str, kind: GrpcServerChoice
) -> None:
    payload = b"the same again, " * 4096
    assert await raw_answer(GrpcOptions(port=0, server=kind, compression=compression), payload, accepted) == (0, payload)


@BOTH
async def test_a_client_that_takes_only_the_other_kind_gets_that(kind: GrpcServerChoice) -> None:
    payload = b"the same again, " * 4096
    for compression, accepted, wbits in ((GrpcCompression.GZIP, "deflate", 15), (GrpcCompression.DEFLATE, "gzip", 31)):
        flag, body = await raw_answer(GrpcOptions(port=0, server=kind, compression=compression), payload, accepted)
        assert (flag, zlib.decompress(body, wbits)) == (1, payload)


@BOTH
async def test_a_compressed_response_is_decompressed_by_grpcs_own_client(kind: GrpcServerChoice) -> None:
    payload = b"the same again, " * 4096
    async with (
        serve_grpc(GrpcOptions(port=0, server=kind, compression=GrpcCompression.GZIP), SERVICES) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        assert await channel.unary_unary("/test.Echo/Say")(payload, timeout=10) == payload


def test_of_two_windows_the_larger_counts_for_both() -> None:
    for connection, stream in ((2**20, 2**17), (2**17, 2**20), (None, 2**20), (2**20, None)):
        options = GrpcOptions(initial_connection_window_size=connection, initial_stream_window_size=stream)
        assert dict(channel_arguments(options, share_port=False))["grpc.http2.lookahead_bytes"] == 2**20
