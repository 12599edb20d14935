"""nats-server as a client sees it: the text protocol, subjects with wildcards, no responders, and clients that break a rule.

Delivery is at most once. `loss` is the share of messages that are lost between two servers of a cluster, which no client notices.
What the real server does is checked by the same tests (`test_contracts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

from tests.simulation.jetstream import JetStream
from tests.simulation.network import Network, ServerEnd

MAX_PAYLOAD = 1024 * 1024
MAX_PENDING = 64 * 1024 * 1024
_NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"
_CONTROL = re.compile(rb"\r\n")


class Client:
    """One connection."""

    def __init__(self, server: SimulatedNats, end: ServerEnd, number: int) -> None:
        self._server = server
        self._end = end
        self.number = number
        self.subscriptions: dict[bytes, tuple[bytes, ...]] = {}
        """By subscription id: the subject, in tokens."""
        self.is_open = True
        self.name = ""
        """As it logged in."""
        self.wants_no_responders = False
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<NATS client {self.number} of {self._end.process.name}, {len(self.subscriptions)} subscriptions>"

    @property
    def process_name(self) -> str:
        return self._end.process.name

    def write(self, data: bytes) -> None:
        if not self.is_open:
            return
        if self._end.unread_bytes + len(data) > self._server.max_pending:
            self._server.event(f"nats cuts slow consumer {self.process_name}")
            self._server.reached("slow-reader-cut")
            return self.refuse("Slow Consumer")
        self._end.write(data)

    def throttle(self, reads_per_s: float | None) -> None:
        self._end.throttle(reads_per_s)

    def refuse(self, why: str) -> None:
        """Say what is wrong, and close the connection."""
        if self.is_open:
            self._end.write(f"-ERR '{why}'\r\n".encode())
            self.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._server.forget(self)
            self._end.close()

    def lost(self) -> None:
        """The network says that the client is gone."""
        if self.is_open:
            self.is_open = False
            self._server.forget(self)

    def on_data(self, data: bytes) -> None:
        if self._server.is_hung:
            self._server.later(lambda: self.on_data(data))
            return
        self._buffer += data
        while self.is_open and self._take():
            pass

    def _take(self) -> bool:
        """Handle one whole command; False if there is none."""
        match = _CONTROL.search(self._buffer)
        if match is None:
            return False
        words = bytes(self._buffer[: match.start()]).split()
        begin = match.end()
        verb = words[0].upper() if words else b""
        if verb in (b"PUB", b"HPUB"):
            size = int(words[-1])
            if size > self._server.max_payload:
                self._server.event(f"nats refuses {size} bytes of {self.process_name}")
                self.refuse("Maximum Payload Violation")
                return False
            if len(self._buffer) < begin + size + 2:
                return False
            payload = bytes(self._buffer[begin : begin + size])
            del self._buffer[: begin + size + 2]
            header = int(words[-2]) if verb == b"HPUB" else 0
            names = words[1 : -2 if verb == b"HPUB" else -1]
            self._server.publish(self, names[0], names[1] if len(names) > 1 else b"", header, payload)
            return True
        del self._buffer[:begin]
        self._handle(verb, words)
        return True

    def _handle(self, verb: bytes, words: list[bytes]) -> None:
        if verb == b"CONNECT":
            options = json.loads(b" ".join(words[1:]))
            self.wants_no_responders = bool(options.get("no_responders"))
            self.name = options.get("name", "")
        elif verb == b"PING":
            self.write(b"PONG\r\n")
        elif verb == b"SUB":
            self.subscriptions[words[-1]] = tuple(words[1].split(b"."))
            self._server.subscriptions_changed()
        elif verb == b"UNSUB":
            self.subscriptions.pop(words[1], None)
            self._server.subscriptions_changed()
        elif verb != b"PONG":
            self.refuse("Unknown Protocol Operation")


class SimulatedNats:
    """A nats-server that can be stopped, started, hung and made lossy."""

    def __init__(
        self,
        network: Network,
        rng: Random,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_pending: int = MAX_PENDING,
        event: Callable[[str], None] = lambda text: None,
        reached: Callable[[str], None] = lambda milestone: None,
    ) -> None:
        self.max_payload = max_payload
        self.max_pending = max_pending
        self.is_up = True
        self.is_hung = False
        self.loss = 0.0
        self.event = event
        self.reached = reached
        self.clients: list[Client] = []
        self.routes: dict[bytes, list[tuple[Client, bytes]]] = {}
        """The subscriptions that each subject was last delivered to; cleared when one changes."""
        self._network = network
        self._rng = rng
        self._count = 0
        self._later: list[Callable[[], None]] = []
        self.jetstream = JetStream(self._send, lambda subject: bool(self._subscriptions_to(subject)), matches, network.loop.time)

    def accepts(self) -> bool:
        return self.is_up

    def connected(self, end: ServerEnd) -> None:
        self._count += 1
        client = Client(self, end, self._count)
        end.on_data, end.on_end = client.on_data, client.lost
        if not self.is_up:
            return client.close()
        self.clients.append(client)
        if self.is_hung:
            self._later.append(lambda: self._greet(client))
        else:
            self._greet(client)

    def publish(self, sender: Client | None, subject: bytes, reply: bytes, header: int, payload: bytes) -> None:
        """Deliver one message to all subscribers of its subject. Without a sender, it comes from elsewhere."""
        if subject[:1] == b"$" and self.jetstream.takes(subject, reply, payload[:header], payload[header:]):
            return
        subscriptions = self.routes.get(subject)
        if subscriptions is None:
            subscriptions = self.routes[subject] = self._subscriptions_to(subject)
        for client, sid in subscriptions:
            if self.loss and self._rng.random() < self.loss:
                continue
            self._deliver(client, subject, sid, reply, header, payload)
        if not subscriptions and reply and sender is not None and sender.wants_no_responders:
            tokens = tuple(reply.split(b"."))
            for sid, pattern in list(sender.subscriptions.items()):
                if matches(pattern, tokens):
                    self._deliver(sender, reply, sid, b"", len(_NO_RESPONDERS), _NO_RESPONDERS)

    def _send(self, to: bytes, subject: bytes, reply: bytes, header: bytes, payload: bytes) -> None:
        """Deliver a message of the server itself to those who subscribe to `to`, as one on `subject`."""
        for client, sid in self._subscriptions_to(to):
            if not (self.loss and self._rng.random() < self.loss):
                self._deliver(client, subject, sid, reply, len(header), header + payload)

    def _subscriptions_to(self, subject: bytes) -> list[tuple[Client, bytes]]:
        tokens = tuple(subject.split(b"."))
        return [
            (client, sid) for client in self.clients for sid, pattern in client.subscriptions.items() if matches(pattern, tokens)
        ]

    def client_named(self, name: str) -> Client | None:
        """Return the connection that logged in with this name."""
        return next((client for client in self.clients if client.name == name), None)

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` when the server no longer hangs."""
        self._later.append(work)

    def forget(self, client: Client) -> None:
        if client in self.clients:
            self.clients.remove(client)
            self.subscriptions_changed()

    def subscriptions_changed(self) -> None:
        self.routes.clear()
        self.jetstream.interest_changed()

    # Faults

    def stop(self) -> None:
        """End as under SIGKILL: connections are cut, messages on the way are lost."""
        self.is_up = self.is_hung = False
        self._later.clear()
        self.jetstream.stop()
        for client in list(self.clients):
            client.close()

    def start(self) -> None:
        self.is_up = True

    def hang(self) -> None:
        """Do nothing any more, as under SIGSTOP; connections stay."""
        self.is_hung = True

    def go_on(self) -> None:
        self.is_hung = False
        later, self._later = self._later, []
        for work in later:
            work()

    def _greet(self, client: Client) -> None:
        info = {
            "server_id": "SIMULATED", "version": "2.10.0", "proto": 1, "headers": True,
            "max_payload": self.max_payload, "jetstream": True, "client_id": client.number,
        }  # fmt: skip
        client.write(f"INFO {json.dumps(info)}\r\n".encode())

    def _deliver(self, client: Client, subject: bytes, sid: bytes, reply: bytes, header: int, payload: bytes) -> None:
        names = b" ".join((subject, sid, reply) if reply else (subject, sid))
        if header:
            client.write(b"HMSG %s %d %d\r\n%s\r\n" % (names, header, len(payload), payload))
        else:
            client.write(b"MSG %s %d\r\n%s\r\n" % (names, len(payload), payload))


def matches(pattern: tuple[bytes, ...], subject: tuple[bytes, ...]) -> bool:
    """Return whether a subject falls under a subscription, which may have the wildcards `*` and `>`."""
    for position, token in enumerate(pattern):
        if token == b">":
            return len(subject) > position
        if position >= len(subject) or token not in (b"*", subject[position]):
            return False
    return len(pattern) == len(subject)
