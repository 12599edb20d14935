"""Publishes what an engine has cached and how busy it is, for routers.

Per engine step, the net change of the KV cache leaves as one numbered message. A load report leaves on change, but at most every
`REPORT_S`, and every `IDLE_REPORT_S` without a change, so that a reader that missed the last update notices it. Both may get
lost: readers then request `events_since` or a `snapshot`, which the publisher takes from the engine's own full copy.

With durable events every message is recorded, too: the record acknowledges each, and messages without acknowledgement are
published again. If they are too old for that, one update with the whole cache replaces them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from dynamo.common.errors import InvalidRequest, ModelNotFound, Unavailable
from dynamo.common.kv.events import (
    KvQuery,
    KvUpdate,
    LoadMessage,
    LoadReport,
    encode_message,
    kv_query_decoder,
    message_encoder,
    request_key,
)
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.worker.engine.base import TracksKv

log = logging.getLogger(__name__)

REPORT_S = 0.05
IDLE_REPORT_S = 0.75
"""Below a second, so that a reader that missed the last update is exact again within one second."""
_ACK_S = 2.0
_MAX_UNRECORDED = 4096
_REPEATED_AT_ONCE = 256
_REPEAT_S = 0.05
"""Between two parts of what is repeated: all of it is on record again within a second of JetStream's return."""
_RETRY_S = 2.0
_CHECK_S = 60.0


class KvPublisher:
    """Publishes events and load of one engine. `accepted` and `stepped` are called on the event loop."""

    def __init__(self, bus: Connection, endpoint: Endpoint, instance: InstanceId, model: str, engine: TracksKv) -> None:
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
        self._receipts = ""
        """The subject at which the record acknowledges updates; empty if updates are not recorded."""
        self._unrecorded: dict[int, float] = {}
        """Number of each update without acknowledgement → when it was published."""
        engine.on_step(self.stepped)

    def __repr__(self) -> str:
        return f"<KvPublisher of {self.model}, kv_number={self.engine.kv.number}, unrecorded={len(self._unrecorded)}>"

    def accepted(self, booking: str) -> None:
        """The engine got the request of `booking`, the id under which a frontend booked it."""
        self._accepted.append(request_key(booking))
        if self._timer is None:
            self._report_soon()

    def stepped(self) -> None:
        """The engine made a step: its cache or its load may have changed."""
        while (update := self.engine.kv.take_update()) is not None:
            # Lost while there is no connection: readers see the gap in the numbers and request what is missing.
            self._publish(update)
        if self._timer is None:
            self._report_soon()

    def _publish(self, update: KvUpdate) -> bool:
        payload, reply = encode_message(self.model, update), ""
        if len(payload) > self._bus.max_payload:
            return False  # the server would cut the connection
        if self._receipts:
            reply = f"{self._receipts}.{update.number}"
            if len(self._unrecorded) <= _MAX_UNRECORDED:
                self._unrecorded[update.number] = self._loop.time()
        return self._bus.publish_soon(self._kv_subject, payload, reply)

    def record(self, receipts: str) -> None:
        """Record updates from now on; `receipts.N` acknowledges update N. An empty `receipts` ends that.

        The first recorded update holds the whole cache, so that the record needs no earlier one.
        """
        self._receipts = receipts
        self._unrecorded.clear()
        if receipts:
            self.engine.kv.queue_full_update()
            self.stepped()

    def recorded(self, number: int) -> None:
        """The record acknowledged update `number`."""
        self._unrecorded.pop(number, None)

    @property
    def reconnected_at(self) -> float:
        """When the connection last came back, on the loop's clock; perhaps to a NATS that has lost what was recorded."""
        return self._bus.reconnected_at

    @property
    def overdue(self) -> bool:
        """Whether an acknowledgement is late."""
        published_at = next(iter(self._unrecorded.values()), math.inf)
        return self._bus.is_connected and published_at <= self._loop.time() - _ACK_S

    def repeat_unrecorded(self) -> None:
        """Publish updates without acknowledgement again, a part of them at a time, or the whole cache if they are too many or too
        old.
        """
        if not self._unrecorded:
            return
        updates = self.engine.kv.since(min(self._unrecorded))
        if updates is None or len(self._unrecorded) > _MAX_UNRECORDED:
            self._unrecorded.clear()
            self.engine.kv.queue_full_update()
            self.stepped()
            return
        waiting = [update for update in updates if update.number in self._unrecorded]
        for update in waiting[:_REPEATED_AT_ONCE]:
            del self._unrecorded[update.number]  # goes to the end: it is the latest now
            if not self._publish(update):
                return

    def _report_soon(self) -> None:
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
            totals=load.totals,
        )

    def report(self) -> None:
        """Publish the load now."""
        self._reported = report = self._report()
        # Each accepted request is named twice, so that one lost report does no harm.
        named = pack_hashes(self._accepted_before + self._accepted)
        self._accepted_before, self._accepted = self._accepted, []
        message = LoadMessage(self.model, msgspec.structs.replace(report, accepted=named))
        self._bus.publish_soon(self._load_subject, message_encoder.encode(message))
        self._next_report_at = self._loop.time() + REPORT_S

    def report_idle(self) -> None:
        """Publish the load unless that was done just now."""
        if self._loop.time() >= self._next_report_at:
            self.report()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class KvPublishers:
    """The publishers of one worker by model, and the handlers for their readers."""

    def __init__(self, publishers: Sequence[KvPublisher]) -> None:
        self._by_model: Mapping[str, KvPublisher] = {publisher.model: publisher for publisher in publishers}

    @property
    def handlers(self) -> dict[str, Handler]:
        """By verb."""
        return {"snapshot": self.snapshot, "events_since": self.events_since}

    def accepted(self, model: str, booking: str) -> None:
        """The engine of `model` got the request of `booking`."""
        publisher = self._by_model.get(model)
        if publisher is not None and booking:
            publisher.accepted(booking)

    async def snapshot(self, incoming: Incoming) -> None:
        """Respond to a `KvQuery` with the model's KvSnapshot."""
        _, publisher = self._decode_query(incoming)
        incoming.end(message_encoder.encode(publisher.engine.kv.snapshot()))

    async def events_since(self, incoming: Incoming) -> None:
        """Respond to a `KvQuery` with the KvUpdates from its number on, or with None if they are no longer kept."""
        query, publisher = self._decode_query(incoming)
        incoming.end(message_encoder.encode(publisher.engine.kv.since(query.since)))

    def _decode_query(self, incoming: Incoming) -> tuple[KvQuery, KvPublisher]:
        try:
            query = kv_query_decoder.decode(incoming.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a KvQuery: {error}") from error
        publisher = self._by_model.get(query.model)
        if publisher is None:
            raise ModelNotFound(query.model)
        return query, publisher

    async def report_idle(self) -> None:
        """Report every load periodically, forever."""
        while True:
            for publisher in self._by_model.values():
                publisher.report_idle()
            await asyncio.sleep(IDLE_REPORT_S)

    async def record(self, record: KvStream) -> None:
        """Record all updates, forever. Waits while the record is not available."""
        publishers = list(self._by_model.values())

        def recorded(receipt: str) -> None:
            position, _, number = receipt.partition(".")
            publishers[int(position)].recorded(int(number))

        is_missed = False
        while True:
            try:
                async with record.receipts(recorded) as receipts:
                    incarnation = await record.ensure()
                    is_missed = False
                    await _record_into(record, incarnation, publishers, receipts)
                    log.warning("the record of KV events was lost, and begins anew")
            except Unavailable as error:
                if not is_missed:
                    log.warning("KV events are not recorded until JetStream is there: %s", error)
                is_missed = True
                await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        for publisher in self._by_model.values():
            publisher.close()


async def _record_into(record: KvStream, incarnation: str, publishers: Sequence[KvPublisher], receipts: str) -> None:
    """Record updates until the record is replaced by a new one. Raises Unavailable if it cannot be created."""
    loop = asyncio.get_running_loop()
    checked_at = loop.time()
    try:
        for position, publisher in enumerate(publishers):
            publisher.record(f"{receipts}.{position}")
        while True:
            await asyncio.sleep(_ACK_S / 2)
            overdue = [publisher for publisher in publishers if publisher.overdue]
            # Others may have made it anew before a receipt was missed.
            is_in_doubt = loop.time() >= checked_at + _CHECK_S or any(each.reconnected_at > checked_at for each in publishers)
            if overdue or is_in_doubt:
                checked_at = loop.time()
                if await record.ensure() != incarnation:
                    return
            for publisher in overdue:
                while publisher.overdue:
                    publisher.repeat_unrecorded()
                    await asyncio.sleep(_REPEAT_S)
    finally:
        for publisher in publishers:
            publisher.record("")


@asynccontextmanager
async def publishing(
    bus: Connection,
    endpoint: Endpoint,
    instance: InstanceId,
    engines: Sequence[tuple[str, TracksKv]],
    record: KvStream | None = None,
) -> AsyncIterator[KvPublishers]:
    """Publish for `engines`, pairs of model and engine, while the body runs; with `record`, durably."""
    publishers = KvPublishers([KvPublisher(bus, endpoint, instance, model, engine) for model, engine in engines])
    async with AsyncExitStack() as stack:
        stack.callback(publishers.close)
        await stack.enter_async_context(running(publishers.report_idle(), "load reports"))
        if record is not None and engines:
            await stack.enter_async_context(running(publishers.record(record), "durable KV events"))
        yield publishers
