"""TLS of many connections on one event loop, and of clients that have keys changed without end."""

from __future__ import annotations

import _ssl
import asyncio
import ctypes
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial

import pytest
import trustme
import uvloop

from dynamo.common.http.accepting import TlsListener
from dynamo.common.lifecycle import open_listener
from dynamo.common.process.turns import LoopTurns
from dynamo.common.security.paced_tls import ENCRYPTED, EncryptedConnection, PacedContext, paced
from tests.support.turns import Loop
from tests.support.waiting import WAIT_S

HANDSHAKE_S = 0.003
SSL_KEY_UPDATE_REQUESTED = 1


class Peer(EncryptedConnection):
    """A client, and the server's side of its connection as an event loop has it: each handshake takes `HANDSHAKE_S`."""

    def __init__(self, loop: Loop, server: PacedContext, client: ssl.SSLContext) -> None:
        super().__init__()
        self._loop = loop
        self.received, self.sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._client_received = ssl.MemoryBIO()
        self._client_sent = self.received
        self.client = client.wrap_bio(self._client_received, self._client_sent, server_hostname="localhost")
        ENCRYPTED.set(self)
        self.server = server.wrap_bio(self.received, self.sent, server_side=True)
        self.has_responded = False

    def say_hello(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self.client.do_handshake()
        self.read_again()

    def finish(self) -> None:
        self._client_received.write(self.sent.read())
        self.client.do_handshake()
        self.server.do_handshake()

    def read_again(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self.server.do_handshake()
        if self.sent.pending and not self.has_responded:
            self.has_responded = True
            self._loop.now += HANDSHAKE_S


def paced_by(loop: Loop, context: ssl.SSLContext) -> PacedContext:
    return paced(context, LoopTurns(loop.call_soon, loop.clock), LoopTurns(loop.call_soon, loop.clock))


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the context of a server and that of its clients."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


def test_handshakes_that_come_at_once_share_the_turns_of_the_loop(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    loop = Loop()
    server = paced_by(loop, contexts[0])
    peers = [Peer(loop, server, contexts[1]) for _ in range(40)]
    for peer in peers:
        peer.say_hello()
    assert loop.now - 100.0 < 3 * HANDSHAKE_S
    took = []
    while not loop.is_idle:
        took.append(loop.turn())
    assert max(took) < 3 * HANDSHAKE_S
    assert all(peer.has_responded for peer in peers)


def test_an_open_connection_does_not_wait_for_handshakes(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    loop = Loop()
    server = paced_by(loop, contexts[0])
    peer = Peer(loop, server, contexts[1])
    peer.say_hello()
    peer.finish()
    for _ in range(40):
        Peer(loop, server, contexts[1]).say_hello()
    peer.client.write(b"request")
    assert peer.server.read(100) == b"request"


def key_updates(port: int, count: int) -> int:
    """Connect, have keys changed up to `count` times, and return how many of these records could be sent.

    Python's own client cannot do that, so this calls the OpenSSL of Python.
    """
    library = ctypes.CDLL(_ssl.__file__)
    pointer = ctypes.c_void_p
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = pointer
    context = pointer(library.SSL_CTX_new(pointer(library.TLS_client_method())))
    sent = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        tls = pointer(library.SSL_new(context))
        library.SSL_set_fd(tls, connection.fileno())
        assert library.SSL_connect(tls) == 1
        while sent < count and library.SSL_key_update(tls, SSL_KEY_UPDATE_REQUESTED) == 1 and library.SSL_do_handshake(tls) == 1:
            sent += 1
        library.SSL_free(tls)
    library.SSL_CTX_free(context)
    return sent


class Kept(asyncio.Protocol):
    """A connection that is kept until its client leaves."""

    def __init__(self, lost: asyncio.Event) -> None:
        self._lost = lost

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()


async def flooded(server: ssl.SSLContext) -> int:
    lost = asyncio.Event()
    listener = open_listener("127.0.0.1", 0, flag="--http-port")
    listener.listen()
    port = listener.getsockname()[1]
    accepting = TlsListener(listener, server, partial(Kept, lost), lambda protocol: lost.set())
    try:
        sent = await asyncio.to_thread(key_updates, port, 20_000)
        async with asyncio.timeout(WAIT_S):
            await lost.wait()
    finally:
        accepting.close()
    return sent


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_that_has_keys_changed_without_end_is_disconnected(
    factory: Callable[[], asyncio.AbstractEventLoop], contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(flooded(contexts[0])) < 20_000


async def greeted(server: ssl.SSLContext, client: ssl.SSLContext, count: int) -> int:
    """Send the first message of so many handshakes before the port accepts; return how many are responded to."""
    listener = open_listener("127.0.0.1", 0, flag="--http-port")
    listener.listen(count)
    port = listener.getsockname()[1]
    loop = asyncio.get_running_loop()
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    message = hello.read()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for each in clients:
        each.sendall(message)
        each.setblocking(False)
    accepting = TlsListener(listener, server, partial(Kept, asyncio.Event()), lambda protocol: None)
    try:
        async with asyncio.timeout(WAIT_S):
            responses = await asyncio.gather(*(loop.sock_recv(each, 1) for each in clients))
    finally:
        for each in clients:
            each.close()
        accepting.close()
    return sum(map(len, responses))


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_came_before_the_connection_was_accepted_begins_its_handshake(
    factory: Callable[[], asyncio.AbstractEventLoop], contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(greeted(*contexts, 50)) == 50


async def test_what_comes_with_the_end_of_the_handshake_reaches_the_connection(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """The client sends a megabyte at once, of which some is there before the connection has its protocol."""
    received = bytearray()
    ended = asyncio.Event()

    class Receiver(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.extend(data)

        def connection_lost(self, error: Exception | None) -> None:
            ended.set()

    listener = open_listener("127.0.0.1", 0, flag="--http-port")
    listener.listen()
    port = listener.getsockname()[1]
    content = bytes(range(256)) * 4096

    def send() -> None:
        with contexts[1].wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost") as client:
            client.sendall(content)
            client.unwrap()

    accepting = TlsListener(listener, contexts[0], Receiver, lambda protocol: ended.set())
    try:
        sender = threading.Thread(target=send)
        sender.start()
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        await asyncio.to_thread(sender.join)
    finally:
        accepting.close()
    assert bytes(received) == content
