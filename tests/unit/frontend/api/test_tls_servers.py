"""TLS and mutual TLS on both ports, and certificates that change while the servers run. grpcio's: `test_grpc_contract.py`."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest
import trustme

from dynamo.common.config import ConfigError, load
from dynamo.common.http.accepting import OTHER_FILES, Descriptors
from dynamo.common.http.served import ServedRequest
from dynamo.common.security.tls import TlsFiles, client_context, read_contents
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import FrontendConfig, GrpcOptions, HttpOptions, PortTlsOptions
from tests.support.certificates import Pair, issue, write_ca
from tests.support.grpc_operations import ECHO

PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


async def hello(request: ServedRequest) -> None:
    await Exchange(request, HttpSettings()).respond(b"hello")


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA, a server's certificate of it, a client's, and a stranger's."""

    ca: trustme.CA
    ca_file: Path
    server: Pair
    client: Pair
    stranger: Pair

    def context(self, client: Pair | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if client is not None:
            context.load_cert_chain(client.cert, client.key)
        return context

    def credentials(self, client: Pair | None = None) -> grpc.ChannelCredentials:
        if client is None:
            return grpc.ssl_channel_credentials(self.ca_file.read_bytes())
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), client.key.read_bytes(), client.cert.read_bytes())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    ca, other = trustme.CA(), trustme.CA()
    return Authority(
        ca,
        write_ca(ca, tmp_path / "ca.pem"),
        issue(ca, tmp_path, "server"),
        issue(ca, tmp_path, "client", "client@example"),
        issue(other, tmp_path, "stranger", "client@example"),
    )


@asynccontextmanager
async def serving(
    protocol: str,
    server: Pair,
    client_ca: Path | None = None,
    ciphers: str | None = None,
    descriptors: Descriptors | None = None,
) -> AsyncIterator[int]:
    """The port of a server that speaks TLS."""
    files = {"tls_cert_file": str(server.cert), "tls_key_file": str(server.key)}
    files |= {"tls_client_ca_file": str(client_ca)} if client_ca else {}
    files |= {"tls_ciphers": ciphers} if ciphers else {}
    tls = PortTlsOptions(**files)
    if protocol == "http":
        async with serve_http(HttpOptions(port=0, port_tls=tls), hello, descriptors=descriptors) as http:
            yield http.port
    else:
        async with serve_grpc(GrpcOptions(port=0, port_tls=tls), ECHO, descriptors=descriptors) as running:
            yield running.port


async def ask(protocol: str, port: int, authority: Authority, client: Pair | None = None) -> bool:
    """Whether a client that trusts the CA, and shows `client`, gets a response."""
    if protocol == "http":
        async with httpx2.AsyncClient(verify=authority.context(client)) as session:
            try:
                return (await session.get(f"https://127.0.0.1:{port}/", timeout=120)).text == "hello"
            except httpx2.TransportError:
                return False
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", authority.credentials(client), options) as channel:
        try:
            response: bytes = await channel.unary_unary("/test.Echo/Say")(b"hi", timeout=120)  # type: ignore[assignment]
            return response == b"hi"
        except grpc.aio.AioRpcError:
            return False


def shown_certificate(port: int) -> bytes:
    """What a new connection gets to see. Blocks."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as plain, context.wrap_socket(plain) as connection:
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return found


def der(pair: Pair) -> bytes:
    first = pair.cert.read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    return ssl.PEM_cert_to_DER_cert(first)


async def shows(port: int, certificate: bytes) -> None:
    """Returns when new connections see this certificate."""
    async with asyncio.timeout(120):
        while await asyncio.to_thread(shown_certificate, port) != certificate:
            await asyncio.sleep(0.1)


@PROTOCOLS
async def test_clients_that_trust_the_certificate_are_served_and_plain_ones_are_not(protocol: str, authority: Authority) -> None:
    async with serving(protocol, authority.server) as port:
        assert await ask(protocol, port, authority)
        with pytest.raises(httpx2.TransportError):
            async with httpx2.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{port}/", timeout=120)


@asynccontextmanager
async def silent(port: int, count: int) -> AsyncIterator[None]:
    """Have so many connections of clients that say nothing."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        yield


@asynccontextmanager
async def all_taken(protocol: str, port: int, authority: Authority) -> AsyncIterator[None]:
    """Have clients that say nothing take all 20 connections; that of an `ask` before may be open for a moment longer."""
    async with silent(port, 20), AsyncExitStack() as stack:
        for _ in range(20):
            if not await ask(protocol, port, authority):
                break
            await stack.enter_async_context(silent(port, 1))
        else:
            pytest.fail("connections are served beyond the bound")
        yield


async def is_served_again(protocol: str, port: int, authority: Authority) -> None:
    async with asyncio.timeout(120):
        while not await ask(protocol, port, authority):
            await asyncio.sleep(0.01)


@PROTOCOLS
async def test_a_connection_uses_a_descriptor_from_before_its_handshake_until_that_fails(
    protocol: str, authority: Authority
) -> None:
    async with serving(protocol, authority.server, descriptors=Descriptors(OTHER_FILES + 20)) as port:
        for _ in range(2):
            async with all_taken(protocol, port, authority):
                pass
            await is_served_again(protocol, port, authority)
        for _ in range(30):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"this is no handshake\r\n\r\n")
            writer.close()
        await is_served_again(protocol, port, authority)


@pytest.mark.parametrize(("protocol", "other"), [("http", "grpc"), ("grpc", "http")])
async def test_all_ports_of_a_process_have_their_descriptors_in_common(protocol: str, other: str, authority: Authority) -> None:
    descriptors = Descriptors(OTHER_FILES + 20)
    async with (
        serving(protocol, authority.server, descriptors=descriptors) as port,
        serving(other, authority.server, descriptors=descriptors) as full,
    ):
        async with all_taken(other, full, authority):
            assert not await ask(protocol, port, authority)
        await is_served_again(protocol, port, authority)


async def test_a_server_that_stops_ends_the_handshakes_that_have_begun(authority: Authority) -> None:
    async with serving("http", authority.server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await ask("http", port, authority)  # so the connection before was accepted
    async with asyncio.timeout(120):
        assert await reader.read() == b""
    writer.close()


@PROTOCOLS
async def test_old_versions_of_tls_are_refused(protocol: str, authority: Authority) -> None:
    async with serving(protocol, authority.server) as port:
        context = authority.context()
        with pytest.warns(DeprecationWarning, match=r"TLSv1_1 is deprecated"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)


@PROTOCOLS
async def test_only_the_permitted_cipher_suites_are_spoken(protocol: str, authority: Authority) -> None:
    async with serving(protocol, authority.server, ciphers="ECDHE+AESGCM") as port:
        context = authority.context()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.set_ciphers("ECDHE+CHACHA20")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
        context.set_ciphers("ECDHE+AESGCM")
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        name, _, _ = writer.get_extra_info("cipher")
        assert "GCM" in name
        writer.close()


@PROTOCOLS
async def test_cipher_suites_that_do_not_exist_stop_the_start(protocol: str, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="the cipher suites 'NOTHING' name none that OpenSSL has"):
        async with serving(protocol, authority.server, ciphers="NOTHING"):
            raise AssertionError("it serves")


@PROTOCOLS
async def test_with_a_client_ca_only_its_clients_come_in(protocol: str, authority: Authority) -> None:
    async with serving(protocol, authority.server, authority.ca_file) as port:
        assert await ask(protocol, port, authority, authority.client)
        assert not await ask(protocol, port, authority)
        assert not await ask(protocol, port, authority, authority.stranger)


@PROTOCOLS
async def test_a_new_certificate_is_used_without_a_restart_and_open_connections_go_on(
    protocol: str, authority: Authority
) -> None:
    async with serving(protocol, authority.server) as port:
        await shows(port, der(authority.server))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.context())
        authority.server.write(authority.ca.issue_cert("127.0.0.1"))
        await shows(port, der(authority.server))
        assert await ask(protocol, port, authority)
        if protocol == "http":
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b"hello" in await reader.read()
        writer.close()


@PROTOCOLS
async def test_a_new_client_ca_is_used_without_a_restart(protocol: str, authority: Authority, tmp_path: Path) -> None:
    other = trustme.CA()
    newcomer = issue(other, tmp_path, "newcomer", "client@example")
    trusted = write_ca(authority.ca, tmp_path / "clients.pem")
    async with serving(protocol, authority.server, trusted) as port:
        assert not await ask(protocol, port, authority, newcomer)
        write_ca(other, trusted)
        async with asyncio.timeout(120):
            while not await ask(protocol, port, authority, newcomer):
                await asyncio.sleep(0.1)
        assert not await ask(protocol, port, authority, authority.client)


@PROTOCOLS
async def test_half_of_a_new_pair_changes_nothing(protocol: str, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(protocol, authority.server) as port:
        before = der(authority.server)
        issued = authority.ca.issue_cert("127.0.0.1")
        authority.server.cert.write_bytes(issued.cert_chain_pems[0].bytes())
        async with asyncio.timeout(120):
            while "the old one stays" not in caplog.text:
                assert await asyncio.to_thread(shown_certificate, port) == before
                await asyncio.sleep(0.1)
        assert "does not belong to the certificate" in caplog.text
        authority.server.key.write_bytes(issued.private_key_pem.bytes())
        await shows(port, der(authority.server))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda a: a.server.cert.unlink(), "the certificate file {cert} cannot be read: No such file or directory"),
        (lambda a: a.server.key.unlink(), "the key file {key} cannot be read: No such file or directory"),
        (lambda a: a.server.cert.write_text("hello"), "the certificate file {cert} holds no certificate in PEM form"),
        (lambda a: a.server.key.write_text("hello"), "the key file {key} holds no private key in PEM form"),
        (
            lambda a: a.server.key.write_bytes(a.client.key.read_bytes()),
            "the key in {key} does not belong to the certificate in {cert}",
        ),
        (lambda a: a.ca_file.write_text("hello"), "the client CA file {ca} holds no certificate in PEM form"),
        (lambda a: a.ca_file.unlink(), "the client CA file {ca} cannot be read: No such file or directory"),
        (
            lambda a: a.server.key.write_text(a.server.key.read_text().replace("PRIVATE", "ENCRYPTED PRIVATE")),
            "the key file {key} is encrypted; servers need it without a passphrase",
        ),
        (
            lambda a: a.server.cert.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "the certificate {cert} and key {key} cannot be used: ",
        ),
    ],
)
async def test_files_that_cannot_be_used_stop_the_start_with_a_sentence(
    authority: Authority, spoil: Callable[[Authority], object], sentence: str
) -> None:
    spoil(authority)
    cert, key, ca = authority.server.cert, authority.server.key, authority.ca_file
    expected = sentence.format(cert=cert, key=key, ca=ca)
    for protocol in ("http", "grpc"):
        with pytest.raises(ConfigError) as error:
            async with serving(protocol, authority.server, ca):
                raise AssertionError("it serves")
        assert str(error.value).startswith(expected)
        assert "\n" not in str(error.value)


def configured(*argv: str, **environ: str) -> FrontendConfig:
    return load(FrontendConfig, argv, environ, program="dynamo-frontend")


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--use-tls", "--cert-file", "c", "--key-file", "k", "--client-ca-file", "a"], {}),
        (["--tls-cert-path", "c", "--tls-key-path", "k", "--tls-client-ca-cert-path", "a"], {}),
        ([], {"DYNAMO_TLS_CERT": "c", "DYNAMO_TLS_KEY": "k", "DYNAMO_TLS_CLIENT_CA": "a"}),
        (["--use-tls"], {"DYN_TLS_CERT_FILE": "c", "DYN_TLS_KEY_FILE": "k", "DYN_TLS_CLIENT_CA_FILE": "a"}),
    ],
)
def test_one_certificate_serves_both_ports(argv: list[str], environ: Mapping[str, str]) -> None:
    config = configured("--grpc", *argv, **environ)
    assert config.http.tls == config.grpc.tls == TlsFiles(cert="c", key="k", client_ca="a")


def test_a_port_may_have_a_certificate_of_its_own() -> None:
    config = configured("--cert-file", "c", "--key-file", "k", "--grpc-tls-cert-file", "gc", "--grpc-tls-key-file", "gk")
    assert config.http.tls == TlsFiles(cert="c", key="k")
    assert config.grpc.tls == TlsFiles(cert="gc", key="gk")


def test_a_port_may_have_cipher_suites_of_its_own() -> None:
    common = ("--cert-file", "c", "--key-file", "k", "--tls-ciphers", "ECDHE+AESGCM")
    config = configured("--grpc", *common)
    assert config.http.tls == config.grpc.tls == TlsFiles(cert="c", key="k", ciphers="ECDHE+AESGCM")
    own = ("--grpc-tls-cert-file", "gc", "--grpc-tls-key-file", "gk", "--grpc-tls-ciphers", "AESGCM")
    config = configured("--grpc", *common, *own)
    assert config.grpc.tls == TlsFiles(cert="gc", key="gk", ciphers="AESGCM")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--use-tls"], "--use-tls needs --cert-file and --key-file"),
        (["--use-tls", "--grpc", "--http-tls-cert-file", "c", "--http-tls-key-file", "k"], "--use-tls needs --cert-file"),
        (["--cert-file", "c"], "--cert-file and --key-file are only useful together"),
        (["--client-ca-file", "a"], "--client-ca-file needs --cert-file and --key-file"),
        (["--tls-ciphers", "AESGCM"], "--tls-ciphers needs --cert-file and --key-file"),
        (
            ["--grpc-server", "grpcio", "--cert-file", "c", "--key-file", "k", "--tls-ciphers", "AESGCM"],
            "--grpc-server grpcio takes cipher suites from GRPC_SSL_CIPHER_SUITES",
        ),
    ],
)
def test_half_of_a_tls_configuration_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(*argv)


def test_without_tls_nothing_speaks_it() -> None:
    config = configured("--grpc")
    assert config.http.tls is None
    assert config.grpc.tls is None


# As a client of NATS and etcd


async def test_a_client_shows_its_newest_certificate_when_it_reconnects(authority: Authority, tmp_path: Path) -> None:
    other = trustme.CA()
    trusted = write_ca(other, tmp_path / "clients.pem")
    files = (str(authority.ca_file), str(authority.client.cert), str(authority.client.key))
    async with serving("http", authority.server, trusted) as port:
        context = client_context(*files)

        async def greeted() -> bool:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                found = b"hello" in await reader.read()
                writer.close()
                return found
            except (ssl.SSLError, ConnectionError):
                return False

        assert not await greeted()
        authority.client.write(other.issue_cert("client@example"))
        async with asyncio.timeout(120):
            while not await greeted():
                await asyncio.sleep(0.1)


def test_contents_are_those_of_the_files(authority: Authority) -> None:
    contents = read_contents(TlsFiles(cert=str(authority.server.cert), key=str(authority.server.key)))
    assert (contents.cert, contents.client_ca) == (authority.server.cert.read_bytes(), None)
