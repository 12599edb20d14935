"""Follows the KV events that vLLM publishes over ZMQ, and keeps a `KvState` equal to what its cache holds.

Each rank publishes batches numbered from 0: three frames, topic, number and msgpack. Missing batches are requested at the
replay address, which sends the batches of the last steps and, last, the number -1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dynamo.common.errors import EngineError
from dynamo.common.kv.events import KvState
from dynamo.common.process.background import running_tasks
from dynamo.worker.kv.vllm_events import (
    AdapterName,
    AllCleared,
    BlocksStored,
    Translator,
    VllmEvent,
    decode_batch,
    parts,
    tier_of,
)

if TYPE_CHECKING:  # every worker imports this module, few follow an engine's events, and zmq takes 12 ms
    import zmq.asyncio

log = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_MAX_UNKNOWN_MEDIA = 16
_MAX_MEDIUM_CHARS = 80
_MAX_NUMBER = 1 << 62
"""An engine that published a thousand batches a second would come to it in a hundred million years."""
_MAX_MESSAGE_BYTES = 4 << 20
"""More than the events of half a million tokens."""
_LONG_BYTES = 64 << 10
"""A longer batch is decoded in a thread."""
_BLOCKS_PER_TURN = 512
"""Blocks of a batch that are applied in one turn of the event loop."""
_MAX_WAITING = 1000
"""Messages that wait here to be read, 4 GiB at most; the publisher drops more, which are replayed or lost."""
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one rank publishes. Addresses are ZMQ endpoints to connect to."""

    rank: int
    events: str
    replay: str | None = None
    replay_timeout_s: float = 5.0


@asynccontextmanager
async def following(
    source: KvSource, kv: KvState, on_change: Callable[[], None], adapter_name: AdapterName = str
) -> AsyncIterator[KvFollower]:
    """Keep the blocks of the source's rank in `kv` current while the body runs, including events published before.

    `adapter_name` returns our name of an adapter from the engine's.
    """
    import zmq.asyncio

    with zmq.asyncio.Context() as context, closing(context.socket(zmq.SUB)) as events:
        context.linger = 0
        events.linger = 0
        events.rcvhwm = _MAX_WAITING
        events.maxmsgsize = _MAX_MESSAGE_BYTES
        events.subscribe(b"")
        follower = KvFollower(source, context, kv, on_change, adapter_name)
        with closing(events.get_monitor_socket(zmq.EVENT_DISCONNECTED)) as monitor:
            events.connect(source.events)
            await follower.catch_up()
            async with running_tasks() as tasks:
                tasks.start(follower.follow(events), f"KV events of rank {source.rank}")
                tasks.start(follower.watch(monitor), f"connection for KV events of rank {source.rank}")
                yield follower


class KvFollower:
    """Follows the events of one rank, on the event loop."""

    def __init__(
        self,
        source: KvSource,
        context: zmq.asyncio.Context,
        kv: KvState,
        on_change: Callable[[], None],
        adapter_name: AdapterName = str,
    ) -> None:
        self._source = source
        self._context = context
        self._kv = kv
        self._on_change = on_change
        self._adapter_name = adapter_name
        self._translator = Translator(adapter_name)
        self._next = 0
        """Number of the next batch."""
        self._is_suspect = False
        """Whether the connection was lost since the last batch, as when the engine was restarted."""
        self._unknown_media: set[str] = set()
        """Unknown media that were logged."""
        self._has_odd = False
        """Whether there was a message that is no batch."""
        self.lost = 0
        """Batches that could not be recovered."""

    def __repr__(self) -> str:
        return f"<KvFollower of rank {self._source.rank}, next={self._next}, lost={self.lost}>"

    async def follow(self, events: zmq.asyncio.Socket) -> None:
        """Apply events as they arrive, forever."""
        while True:
            if (message := self._numbered(await events.recv_multipart())) is not None:
                await self._take(*message)
            await asyncio.sleep(0)  # receiving what has come already is no turn of the loop, and there may always be more

    def _numbered(self, parts: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return the number of a batch and the batch; None for a message that is none. Older versions send no topic in front."""
        *_, number, payload = (b"", b"", *parts)
        if len(parts) > 1 and len(number) == _NUMBER_BYTES and (found := int.from_bytes(number, "big")) <= _MAX_NUMBER:
            return found, payload
        if not self._has_odd:
            self._has_odd = True
            log.warning("%s publishes what are no KV events of vLLM or SGLang, and that is left out", self._source.events)
        return None

    async def watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Notice when the connection is lost, forever."""
        while True:
            await monitor.recv_multipart()
            self._is_suspect = True

    async def _take(self, number: int, payload: bytes) -> None:
        if self._is_suspect:
            self._is_suspect = False
            if number != self._next:
                self._restart()
        if number > self._next:
            await self.catch_up()
        if number < self._next:
            return  # the replay had it
        if number > self._next:
            self._forget(number)
        await self._apply(payload)
        self._on_change()

    async def catch_up(self) -> None:
        """Request a replay of all batches from the next one on."""
        if self._source.replay is None:
            return
        import zmq

        with closing(self._context.socket(zmq.DEALER)) as dealer:
            dealer.maxmsgsize = _MAX_MESSAGE_BYTES
            dealer.connect(self._source.replay)
            until = asyncio.get_running_loop().time() + self._source.replay_timeout_s
            try:
                async with asyncio.timeout_at(until):
                    await dealer.send_multipart([b"", self._next.to_bytes(_NUMBER_BYTES, "big")])
                while True:
                    async with asyncio.timeout_at(until):  # not while a batch is applied, of which nothing may be left out
                        parts = await dealer.recv_multipart()
                    if _END in parts[-2:-1]:
                        break
                    if (message := self._numbered(parts)) is not None:
                        await self._replayed(*message)
                    await asyncio.sleep(0)
            except TimeoutError:
                log.warning("the engine did not replay its KV events within %.0f s", self._source.replay_timeout_s)
        self._on_change()

    async def _replayed(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return
        if number > self._next:
            self._forget(number)
        await self._apply(payload)

    def _forget(self, number: int) -> None:
        """Skip the lost batches before `number`. Their removals are unknown, so the cache is seen as empty."""
        log.warning("the engine's KV events %d to %d are lost: routers see its cache as empty", self._next, number - 1)
        self.lost += number - self._next
        self._next = number
        self._translator = Translator(self._adapter_name)
        self._kv.clear(self._source.rank)

    def _restart(self) -> None:
        """Begin again: the numbers are those of another process, whose cache was empty at its beginning."""
        log.info("the engine's KV events begin again")
        self._next = 0
        self._translator = Translator(self._adapter_name)
        self._kv.clear(self._source.rank)

    async def _apply(self, payload: bytes) -> None:
        self._next += 1
        try:
            batch = decode_batch(payload) if len(payload) <= _LONG_BYTES else await asyncio.to_thread(decode_batch, payload)
        except EngineError as error:
            log.warning("%s", error)
            return
        unknown = self._translator.unknown
        done = 0
        for part in chain.from_iterable(map(parts, batch.events)):
            done += self._change(part)
            if done >= _BLOCKS_PER_TURN:
                done = 0
                await asyncio.sleep(0)
        if self._translator.unknown > unknown:
            self._leave_out(batch.events, self._translator.unknown - unknown)

    def _change(self, event: VllmEvent) -> int:
        """Return about how many blocks of 16 tokens take as long."""
        kv, rank = self._kv, self._source.rank
        change = self._translator.translate(event)
        if change.cleared:
            kv.clear(rank)
        kv.remove(change.removed, rank, change.tier)
        kv.store(change.stored, rank, change.tier)
        if isinstance(event, AllCleared):
            return 1
        return 1 + len(event.hashes) + (len(event.token_ids) // 16 if isinstance(event, BlocksStored) else 0)

    def _leave_out(self, events: Sequence[VllmEvent], blocks: int) -> None:
        """Count blocks on unknown media, and log each such medium once."""
        self._kv.count_unknown(blocks)
        for event in events:
            if not isinstance(event, AllCleared) and tier_of(event.medium, event.locality) is None:
                medium = f"{event.medium[:_MAX_MEDIUM_CHARS]} {event.locality[:_MAX_MEDIUM_CHARS]}".strip()
                if medium not in self._unknown_media and len(self._unknown_media) < _MAX_UNKNOWN_MEDIA:
                    self._unknown_media.add(medium)
                    log.warning("the engine keeps KV blocks on a medium that is unknown, and that counts for nothing: %r", medium)
