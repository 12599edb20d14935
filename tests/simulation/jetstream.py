"""JetStream as our client uses it: streams behind key-value buckets and object stores, in the simulated nats-server.

Messages that a stream takes are kept over a restart, as with `sync_interval: always`. There are acknowledgements of what was
published, conditions on the last sequence, roll-ups, purges, direct reads, and push consumers that deliver what there is and what
comes. There are neither clusters, nor expiry, nor consumers that acknowledge. What the real server does is checked by the same
tests (`test_contracts`).
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

API = b"$JS.API."
_NOT_FOUND = {"code": 404, "err_code": 10059, "description": "stream not found"}
_NO_MESSAGE = {"code": 404, "err_code": 10037, "description": "no message found"}
_NO_CONSUMER = {"code": 404, "err_code": 10014, "description": "consumer not found"}
_NO_CLUSTER = {"code": 500, "err_code": 10074, "description": "replicas > 1 not supported in non-clustered mode"}
_FULL = {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}
_START = datetime(2027, 1, 15, 8, tzinfo=UTC)
"""The server's time when the history begins."""
_MESSAGE_COST = 32
"""Bytes beside subject, header and payload."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream."""

    sequence: int
    subject: bytes
    header: bytes
    payload: bytes
    at_s: float
    """When it was stored, in seconds since the history began."""

    @property
    def cost(self) -> int:
        return len(self.subject) + len(self.header) + len(self.payload) + _MESSAGE_COST


@dataclass(eq=False, slots=True)
class Stream:
    config: dict[str, Any]
    sequence: int = 0
    """Sequence of the last message."""
    messages: dict[int, Stored] = field(default_factory=dict)
    last: dict[bytes, int] = field(default_factory=dict)
    """The last sequence of each subject of which there are messages."""

    @property
    def subjects(self) -> list[tuple[bytes, ...]]:
        return [tuple(subject.encode().split(b".")) for subject in self.config["subjects"]]

    @property
    def size_bytes(self) -> int:
        return sum(message.cost for message in self.messages.values())

    def on(self, subject: bytes) -> list[Stored]:
        return [message for message in self.messages.values() if message.subject == subject]

    def remove(self, message: Stored) -> None:
        del self.messages[message.sequence]
        if self.last[message.subject] == message.sequence:
            del self.last[message.subject]


@dataclass(eq=False, slots=True)
class Consumer:
    """A push consumer: sends what matches to a subject, as long as it has a subscriber."""

    name: str
    stream: Stream
    config: dict[str, Any]
    waiting: list[Stored]
    """What there was when it was made, until it has a subscriber."""
    delivered: int = 0
    sequence: int = 0
    """Sequence of the last message delivered."""

    @property
    def deliver_subject(self) -> bytes:
        subject: str = self.config["deliver_subject"]
        return subject.encode()

    @property
    def pattern(self) -> tuple[bytes, ...]:
        return tuple(self.config.get("filter_subject", ">").encode().split(b"."))


Publish = Callable[[bytes, bytes, bytes, bytes, bytes], None]
"""Delivers a message to those who subscribe to a subject: that, the subject which they are shown, reply, header, payload."""
Matches = Callable[[tuple[bytes, ...], tuple[bytes, ...]], bool]


class JetStream:
    """All streams of a server."""

    def __init__(
        self, publish: Publish, has_interest: Callable[[bytes], bool], matches: Matches, clock: Callable[[], float]
    ) -> None:
        self.streams: dict[str, Stream] = {}
        self.is_full = False
        """It takes no more messages, as with a full disk."""
        self._publish = publish
        self._has_interest = has_interest
        self._matches = matches
        self._clock = clock
        self._consumers: dict[str, Consumer] = {}
        self._count = 0

    def takes(self, subject: bytes, reply: bytes, header: bytes, payload: bytes) -> bool:
        """Handle a message that is for JetStream; return whether it is one of the API. Others are for subscribers, too."""
        if subject.startswith(API):
            if reply:
                self._respond(subject.removeprefix(API), reply, payload)
            return True
        if subject.startswith((b"$KV.", b"$O.")):
            stream = self._stream_of(subject)
            if stream is not None:
                self._say(reply, self._store(stream, subject, header, payload))
                return True
        return False

    def interest_changed(self) -> None:
        """A client subscribed or left: deliver to those that consumers waited for, and drop consumers without subscribers."""
        for name, consumer in list(self._consumers.items()):
            if self._has_interest(consumer.deliver_subject):
                waiting, consumer.waiting = consumer.waiting, []
                for left, message in zip(range(len(waiting) - 1, -1, -1), waiting, strict=True):
                    self._deliver(consumer, message, left)
            elif consumer.delivered:
                del self._consumers[name]

    def stop(self) -> None:
        """The server ends: streams are on disk, consumers are not."""
        self._consumers.clear()

    # Messages

    def _stream_of(self, subject: bytes) -> Stream | None:
        tokens = tuple(subject.split(b"."))
        for stream in self.streams.values():
            if any(self._matches(pattern, tokens) for pattern in stream.subjects):
                return stream
        return None

    def _store(self, stream: Stream, subject: bytes, header: bytes, payload: bytes) -> dict[str, Any]:
        fields = _fields(header)
        if "nats-rollup" in fields and not stream.config.get("allow_rollup_hdrs"):
            return {"error": {"code": 400, "err_code": 10111, "description": "rollup not permitted"}}
        if (expected := fields.get("nats-expected-last-subject-sequence")) is not None:
            last = stream.last.get(subject, 0)
            if int(expected) != last:
                return {"error": {"code": 400, "err_code": 10071, "description": f"wrong last sequence: {last}"}}
        message = Stored(stream.sequence + 1, subject, header, payload, self._clock())
        limit = stream.config.get("max_bytes") or -1
        if self.is_full or 0 < limit < stream.size_bytes + message.cost - self._replaced(stream, subject, fields):
            return {"error": _FULL}
        stream.sequence += 1
        stream.messages[message.sequence] = message
        stream.last[subject] = message.sequence
        keep = stream.config.get("max_msgs_per_subject") or -1
        if fields.get("nats-rollup") == "sub":
            keep = 1
        if keep > 0:
            for old in stream.on(subject)[:-keep]:
                stream.remove(old)
        for consumer in list(self._consumers.values()):
            if consumer.stream is stream and self._matches(consumer.pattern, tuple(subject.split(b"."))):
                if consumer.waiting or not self._has_interest(consumer.deliver_subject):
                    consumer.waiting.append(message)
                else:
                    self._deliver(consumer, message, 0)
        return {"stream": stream.config["name"], "seq": message.sequence}

    def _replaced(self, stream: Stream, subject: bytes, fields: dict[str, str]) -> int:
        """Return the bytes that go when a message on a subject comes."""
        if stream.config.get("max_msgs_per_subject") == 1 or fields.get("nats-rollup") == "sub":
            return sum(message.cost for message in stream.on(subject))
        return 0

    def _deliver(self, consumer: Consumer, message: Stored, pending: int) -> None:
        consumer.delivered += 1
        consumer.sequence = message.sequence
        reply = (
            f"$JS.ACK.{consumer.stream.config['name']}.{consumer.name}.1."
            f"{message.sequence}.{consumer.delivered}.{_nanoseconds(message.at_s)}.{pending}"
        )
        payload = b"" if consumer.config.get("headers_only") else message.payload
        header = message.header
        if consumer.config.get("headers_only"):
            size = f"Nats-Msg-Size: {len(message.payload)}\r\n\r\n".encode()
            header = (header.removesuffix(b"\r\n") if header else b"NATS/1.0\r\n") + size
        self._publish(consumer.deliver_subject, message.subject, reply.encode(), header, payload)

    def _say(self, reply: bytes, response: dict[str, Any]) -> None:
        if reply:
            self._publish(reply, reply, b"", b"", json.dumps(response).encode())

    # The API

    def _respond(self, subject: bytes, reply: bytes, payload: bytes) -> None:
        words = subject.decode().split(".")
        request = json.loads(payload) if payload[:1] == b"{" else {}
        if words[:2] == ["DIRECT", "GET"]:
            return self._read_directly(words[2], ".".join(words[3:]), request, reply)
        self._say(reply, self._responded(words, request))

    def _responded(self, words: list[str], request: dict[str, Any]) -> dict[str, Any]:
        match words:
            case ["STREAM", "CREATE", name]:
                if (request.get("num_replicas") or 1) > 1:
                    return {"error": _NO_CLUSTER}
                stream = self.streams.setdefault(name, Stream(request))
                return _described(stream) | {"ts": _shown_time(self._clock())}
            case ["STREAM", "NAMES"]:
                subject = tuple(request["subject"].encode().split(b"."))
                names = [
                    name
                    for name, each in self.streams.items()
                    if any(self._matches(pattern, subject) for pattern in each.subjects)
                ]
                return {"total": len(names), "offset": 0, "limit": 1024, "streams": names}
        name = words[3] if words[:3] == ["STREAM", "MSG", "GET"] else words[2]
        found = self.streams.get(name)
        if found is None:
            return {"error": _NOT_FOUND}
        match words:
            case ["STREAM", "INFO", _]:
                described = _described(found) | {"ts": _shown_time(self._clock())}
                if "subjects_filter" in request:
                    described["state"]["subjects"] = self._counted(found, request["subjects_filter"])
                return described
            case ["STREAM", "PURGE", _]:
                pattern = tuple(request.get("filter", ">").encode().split(b"."))
                gone = [each for each in found.messages.values() if self._matches(pattern, tuple(each.subject.split(b".")))]
                for message in gone:
                    found.remove(message)
                return {"success": True, "purged": len(gone)}
            case ["STREAM", "MSG", "GET", _]:
                read = self._found(found, request)
                return {"error": _NO_MESSAGE} if read is None else {"message": _shown(read)}
            case ["CONSUMER", "CREATE", _, *_]:
                return self._make_consumer(found, request["config"])
            case ["CONSUMER", "INFO", _, consumer]:
                known = self._consumers.get(consumer)
                return {"error": _NO_CONSUMER} if known is None else _described_consumer(known)
            case ["CONSUMER", "DELETE", _, consumer]:
                return {"success": True} if self._consumers.pop(consumer, None) else {"error": _NO_CONSUMER}
        raise NotImplementedError(".".join(words))

    def _counted(self, stream: Stream, pattern: str) -> dict[str, int]:
        """Return how many messages there are on each subject that matches."""
        tokens = tuple(pattern.encode().split(b"."))
        subjects = [each.subject for each in stream.messages.values() if self._matches(tokens, tuple(each.subject.split(b".")))]
        return {subject.decode(): count for subject, count in Counter(subjects).items()}

    def _found(self, stream: Stream, request: dict[str, Any]) -> Stored | None:
        if "next_by_subj" in request:
            pattern = tuple(request["next_by_subj"].encode().split(b"."))
            later = [each for number, each in stream.messages.items() if number >= request.get("seq", 0)]
            return next((each for each in later if self._matches(pattern, tuple(each.subject.split(b".")))), None)
        if "last_by_subj" not in request:
            return stream.messages.get(request["seq"])
        pattern = tuple(request["last_by_subj"].encode().split(b"."))
        sequences = [number for subject, number in stream.last.items() if self._matches(pattern, tuple(subject.split(b".")))]
        return stream.messages[max(sequences)] if sequences else None

    def _read_directly(self, name: str, subject: str, request: dict[str, Any], reply: bytes) -> None:
        stream = self.streams.get(name)
        message = None if stream is None else self._found(stream, {"last_by_subj": subject} if subject else request)
        if message is None:
            return self._publish(reply, reply, b"", b"NATS/1.0 404 Message Not Found\r\n\r\n", b"")
        header = (
            f"Nats-Stream: {name}\r\nNats-Subject: {message.subject.decode()}\r\n"
            f"Nats-Sequence: {message.sequence}\r\nNats-Time-Stamp: {_shown_time(message.at_s)}\r\n"
        ).encode()
        begin = message.header.removesuffix(b"\r\n") if message.header else b"NATS/1.0\r\n"
        self._publish(reply, reply, b"", begin + header + b"\r\n", message.payload)

    def _make_consumer(self, stream: Stream, config: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        consumer = Consumer(f"consumer{self._count}", stream, config, [])
        consumer.waiting = [
            message for message in _since(stream, config) if self._matches(consumer.pattern, tuple(message.subject.split(b".")))
        ]
        self._consumers[consumer.name] = consumer
        described = _described_consumer(consumer)
        self.interest_changed()
        return described


def _since(stream: Stream, config: dict[str, Any]) -> Iterator[Stored]:
    """Yield the messages that a consumer begins with."""
    policy = config.get("deliver_policy", "all")
    for message in list(stream.messages.values()):
        if policy == "all":
            yield message
        elif policy == "last_per_subject":
            if stream.last.get(message.subject) == message.sequence:
                yield message
        elif policy == "by_start_sequence":
            if message.sequence >= config["opt_start_seq"]:
                yield message
        elif policy != "new":
            raise NotImplementedError(policy)


def _fields(header: bytes) -> dict[str, str]:
    lines = header.decode().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _shown_time(at_s: float) -> str:
    return (_START + timedelta(seconds=at_s)).isoformat()


def _nanoseconds(at_s: float) -> int:
    return int((_START.timestamp() + at_s) * 1e9)


def _shown(message: Stored) -> dict[str, Any]:
    shown: dict[str, Any] = {"subject": message.subject.decode(), "seq": message.sequence, "time": _shown_time(message.at_s)}
    shown["data"] = base64.b64encode(message.payload).decode()
    if message.header:
        shown["hdrs"] = base64.b64encode(message.header).decode()
    return shown


def _described(stream: Stream) -> dict[str, Any]:
    state = {
        "messages": len(stream.messages),
        "bytes": stream.size_bytes,
        "first_seq": min(stream.messages, default=stream.sequence + 1),
        "last_seq": stream.sequence,
        "consumer_count": 0,
    }
    return {"config": stream.config, "created": _shown_time(0), "state": state}


def _described_consumer(consumer: Consumer) -> dict[str, Any]:
    return {
        "stream_name": consumer.stream.config["name"],
        "name": consumer.name,
        "created": _shown_time(0),
        "config": consumer.config,
        "delivered": {"consumer_seq": consumer.delivered, "stream_seq": consumer.sequence},
        "ack_floor": {"consumer_seq": 0, "stream_seq": 0},
        "num_ack_pending": 0,
        "num_redelivered": 0,
        "num_waiting": 0,
        "num_pending": len(consumer.waiting),
        "push_bound": True,
    }
