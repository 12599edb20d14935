"""Tells routers what an engine has cached and how busy it is.

Per engine step, the net change of the KV cache leaves as one numbered message. A load report leaves on change, but at most every
`REPORT_S`, and every `IDLE_REPORT_S` without a change, so that a reader which missed the last update learns of it. Both may get
lost: readers ask for `events_since` or a `snapshot`, which the publisher answers from the engine's own full copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.errors import InvalidRequest, ModelNotFound
from dynamo.common.kv.events import (
    KvMessage,
    KvQuestion,
    LoadMessage,
    LoadReport,
    message_encoder,
    question_decoder,
    request_key,
)
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.messaging.frames import Body, Buffer
from dynamo.common.messaging.server import Handler
from dynamo.common.names import Endpoint, InstanceId
from dynamo.worker.engine.base import TracksKv

REPORT_S = 0.05
IDLE_REPORT_S = 1.0


class Bus(Protocol):
    """The part of `messaging.connection.Connection` that publishing needs."""

    def publish_nowait(self, subject: str, payload: Body, reply: str = "") -> bool: ...


class Question(Protocol):
    """The part of `messaging.server.Incoming` that answering needs."""

    body: Buffer

    async def end(self, body: Body = b"") -> None: ...


class KvPublisher:
    """Follows one engine. `accepted` and `stepped` are called on the event loop."""

    def __init__(self, bus: Bus, endpoint: Endpoint, instance: InstanceId, model: str, engine: TracksKv) -> None:
        self.model = model
        self.engine = engine
        self._bus = bus
        self._kv_subject = endpoint.kv_subject(instance)
        self._load_subject = endpoint.load_subject(instance)
        self._loop = asyncio.get_running_loop()
        self._accepted: list[int] = []
        self._accepted_before: list[int] = []
        self._reported: LoadReport | None = None
        self._next_report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        engine.on_step(self.stepped)

    def accepted(self, booking: str) -> None:
        """The engine has a request that a frontend knows as `booking`."""
        self._accepted.append(request_key(booking))
        self._report_soon()

    def stepped(self) -> None:
        """The engine did a step: its cache or its load may have changed."""
        update = self.engine.kv.take_update()
        if update is not None:
            # Lost while there is no connection: readers see the hole in the numbers and ask.
            self._bus.publish_nowait(self._kv_subject, message_encoder.encode(KvMessage(self.model, update)))
        self._report_soon()

    def _report_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(self._next_report_at, self._report_if_changed)

    def _report_if_changed(self) -> None:
        self._timer = None
        if self._accepted or self._report() != self._reported:
            self.report()

    def _report(self) -> LoadReport:
        load = self.engine.load()
        return LoadReport(
            waiting=load.waiting,
            running=load.running,
            active_blocks=load.active_blocks,
            total_blocks=load.total_blocks,
            queued_prefill_tokens=load.queued_prefill_tokens,
            step_ms=load.step_ms,
            kv_number=self.engine.kv.number,
        )

    def report(self) -> None:
        """Publishes the load now."""
        self._reported = report = self._report()
        # Each accepted request is named twice, so that one lost report does no harm.
        named = pack_hashes(self._accepted_before + self._accepted)
        self._accepted_before, self._accepted = self._accepted, []
        message = LoadMessage(self.model, msgspec.structs.replace(report, accepted=named))
        self._bus.publish_nowait(self._load_subject, message_encoder.encode(message))
        self._next_report_at = self._loop.time() + REPORT_S

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class KvPublishers:
    """The publishers of one worker, by model, and the questions of its readers."""

    def __init__(self, publishers: Sequence[KvPublisher]) -> None:
        self._by_model: Mapping[str, KvPublisher] = {publisher.model: publisher for publisher in publishers}

    @property
    def handlers(self) -> dict[str, Handler]:
        """By verb."""
        return {"snapshot": self.snapshot, "events_since": self.events_since}

    def accepted(self, model: str, booking: str) -> None:
        """A request of a model was given to its engine."""
        publisher = self._by_model.get(model)
        if publisher is not None and booking:
            publisher.accepted(booking)

    async def snapshot(self, question: Question) -> None:
        """A `KvQuestion`, answered with the model's KvSnapshot."""
        _, publisher = self._asked(question)
        await question.end(message_encoder.encode(publisher.engine.kv.snapshot()))

    async def events_since(self, question: Question) -> None:
        """A `KvQuestion`, answered with the list of KvUpdates from its number on, or None if they are not kept any more."""
        asked, publisher = self._asked(question)
        await question.end(message_encoder.encode(publisher.engine.kv.since(asked.since)))

    def _asked(self, question: Question) -> tuple[KvQuestion, KvPublisher]:
        try:
            asked = question_decoder.decode(question.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a question about a KV cache: {error}") from error
        publisher = self._by_model.get(asked.model)
        if publisher is None:
            raise ModelNotFound(asked.model)
        return asked, publisher

    async def report_idle(self) -> None:
        """Reports every load now and then, forever."""
        while True:
            for publisher in self._by_model.values():
                publisher.report()
            await asyncio.sleep(IDLE_REPORT_S)

    def close(self) -> None:
        for publisher in self._by_model.values():
            publisher.close()


@asynccontextmanager
async def publishing(
    bus: Bus, endpoint: Endpoint, instance: InstanceId, engines: Sequence[tuple[str, TracksKv]]
) -> AsyncIterator[KvPublishers]:
    """Publishes for the engines of these models until the context is left."""
    publishers = KvPublishers([KvPublisher(bus, endpoint, instance, model, engine) for model, engine in engines])
    idle = asyncio.create_task(publishers.report_idle(), name="load reports")
    try:
        yield publishers
    finally:
        idle.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await idle
        publishers.close()
