"""What the frontends of a namespace, and the processes of each, tell one another besides bookings.

Busy thresholds that were set at run time hold for all of them: each change is published, and who starts, or comes back from a
lost connection, asks for those it missed. With `--router-replica-sync` they also tell where sessions are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import msgspec

from dynamo.common.messaging.connection import Connection
from dynamo.common.names import InstanceId, frontends_subject
from dynamo.frontend.router.affinity import SessionKey, SessionRouter
from dynamo.frontend.router.thresholds import Thresholds, ThresholdTable

log = logging.getLogger(__name__)


class _Asking(msgspec.Struct, frozen=True, array_like=True, tag="asking"):
    """Someone who knows nothing yet."""


class _Changed(msgspec.Struct, frozen=True, array_like=True, tag="thresholds"):
    model: str
    at_ms: int
    active_decode_blocks: float | None
    active_prefill_tokens: int | None


class _Placed(msgspec.Struct, frozen=True, array_like=True, tag="session"):
    key: SessionKey
    instance: int


_Word: TypeAlias = _Asking | _Changed | _Placed


class _Message(msgspec.Struct, frozen=True, array_like=True):
    origin: str
    words: list[_Word]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)
_WORDS_PER_MESSAGE = 500


class Siblings:
    """One message per event-loop turn. Use `open_siblings`."""

    def __init__(self, connection: Connection, namespace: str, thresholds: ThresholdTable) -> None:
        self.sessions: SessionRouter | None = None
        """Takes what others say of their sessions."""
        self._connection = connection
        self._subject = frontends_subject(namespace)
        self._thresholds = thresholds
        self._origin = secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Word] = []

    def set_thresholds(self, model: str, thresholds: Thresholds) -> None:
        """They hold here at once, and everywhere else when the word has got around."""
        # Later than any change known here, even if the clock of who made that one is ahead of ours.
        at_ms = max(time.time_ns() // 1_000_000, self._thresholds.changed_at_ms(model) + 1)
        self._thresholds.set(model, thresholds, at_ms)
        self._say(_changed(model, at_ms, thresholds))

    def place(self, key: SessionKey, instance: InstanceId) -> None:
        """Given to the SessionRouter as `on_placed`."""
        self._say(_Placed(key, instance))

    def ask(self) -> None:
        """Whoever knows of changed thresholds shall tell them, and hear ours."""
        self._say(_Asking())
        self._tell_all()

    def on_message(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        try:
            message = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("a message on %s cannot be read: %s", subject, error)
            return
        if message.origin != self._origin:
            for word in message.words:
                self._hear(word)

    def _hear(self, word: _Word) -> None:
        match word:
            case _Changed(model, at_ms, decode, prefill):
                thresholds = Thresholds(active_decode_blocks=decode, active_prefill_tokens=prefill)
                if self._thresholds.set(model, thresholds, at_ms):
                    log.info("busy thresholds of model '%s' are now %s", model, thresholds)
            case _Placed(key, instance):
                if self.sessions is not None:
                    self.sessions.placed(key, InstanceId(instance))
            case _Asking():
                self._tell_all()

    def _tell_all(self) -> None:
        for model, (at_ms, thresholds) in self._thresholds.changes().items():
            self._say(_changed(model, at_ms, thresholds))

    def _say(self, word: _Word) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(word)

    def _flush(self) -> None:
        words, self._waiting = self._waiting, []
        for at in range(0, len(words), _WORDS_PER_MESSAGE):
            message = _Message(self._origin, words[at : at + _WORDS_PER_MESSAGE])
            self._connection.publish_nowait(self._subject, _encoder.encode(message))


def _changed(model: str, at_ms: int, thresholds: Thresholds) -> _Changed:
    return _Changed(model, at_ms, thresholds.active_decode_blocks, thresholds.active_prefill_tokens)


@asynccontextmanager
async def open_siblings(connection: Connection, namespace: str, thresholds: ThresholdTable) -> AsyncIterator[Siblings]:
    """Exchanges with the other frontends of the namespace while the body runs."""
    siblings = Siblings(connection, namespace, thresholds)
    subscription = await connection.subscribe(siblings._subject, siblings.on_message)
    connection.on_reconnect(siblings.ask)
    siblings.ask()
    try:
        yield siblings
    finally:
        await subscription.close()
