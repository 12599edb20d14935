"""The recorded history of a component's KV caches: a snapshot, and the events since.

A frontend that starts reads both instead of requesting snapshots from the instances. After enough events, one of the frontends
makes a new snapshot: the old one with the recorded events applied. Then it truncates the record up to there. Instances that are
gone are left out. If the record of an instance has a gap, its snapshot is requested from the instance.

The history is an optimization: what cannot be read is requested from the instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import KvSnapshot, KvUpdate, read_message
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.names import Endpoint, InstanceId, instance_of
from dynamo.frontend.fleet.kv.archive import Archive, Archived, archive_decoder, archive_encoder, cut, fold

log = logging.getLogger(__name__)

Key = tuple[InstanceId, str]
"""An instance and a model."""

_READ_S = 1.0
"""Time limit for reading: beyond it, requesting snapshots from the instances is faster. Only what is missing is requested."""
_SNAPSHOT_S = 40.0
"""Time limit for making a snapshot, below the lifetime of its lock."""


class CacheReader(Protocol):
    """The subscriber of the history: the `KvFeed`."""

    def followed(self, endpoint: Endpoint) -> set[Key]: ...

    def restore(self, instance: InstanceId, model: str, snapshot: KvSnapshot) -> None: ...

    def apply_update(self, instance: InstanceId, model: str, update: KvUpdate) -> None: ...

    async def fetch_snapshot(self, instance: InstanceId, model: str) -> KvSnapshot | None: ...

    def most_blocks(self, instance: InstanceId, model: str) -> int:
        """Return how many blocks are kept of an instance."""
        ...


class KvHistory:
    """`snapshot_threshold`: recorded events after which a snapshot is due. `reset`: begin by forgetting what is recorded."""

    def __init__(self, record: KvStream, *, snapshot_threshold: int = 10_000, reset: bool = False) -> None:
        self._record = record
        self._threshold = snapshot_threshold
        self._reset = reset
        self._events: dict[str, int] = {}
        """Events since the last snapshot that this frontend received, by the subject without the instance."""
        self._due: dict[str, asyncio.Event] = {}
        self.snapshots = 0
        """How many snapshots this frontend made."""

    def count_events(self, subject: str, events: int = 1) -> None:
        """Count events that arrived on a subject."""
        name = _name_of(subject)
        self._events[name] = count = self._events.get(name, 0) + events
        if count >= self._threshold and (due := self._due.get(name)) is not None:
            due.set()

    async def read(self, endpoint: Endpoint, reader: CacheReader) -> None:
        """Feed the recorded snapshot and events of a component to `reader`. Gives up with a warning on errors or after a
        second."""
        try:
            async with asyncio.timeout(_READ_S):
                await self._read(endpoint, reader)
        except TimeoutError:
            log.warning("the recorded KV events of %s take too long to read: the rest is requested from the instances", endpoint)
        except (DynamoError, ValueError, RecursionError) as error:
            log.warning(
                "the recorded KV events of %s cannot be used; requesting snapshots from the instances: %s", endpoint, error
            )

    async def _read(self, endpoint: Endpoint, reader: CacheReader) -> None:
        subject = endpoint.kv_subject()
        name = _name_of(subject)
        if self._reset:
            await self._record.purge(subject)
            await self._record.forget(name)
            return
        archive = await self._archive(name)
        for part in archive.parts:
            reader.restore(InstanceId(part.instance), part.model, part.snapshot)
            await asyncio.sleep(0)  # a large one takes a millisecond
        async with aclosing(self._since(subject, archive.sequence)) as batches:
            async for _, events in batches:
                for (instance, model), update in events:
                    reader.apply_update(instance, model, update)
                self.count_events(subject, len(events))

    async def keep_compact(self, endpoint: Endpoint, reader: CacheReader) -> None:
        """Make a snapshot whenever one is due, until cancelled."""
        subject = endpoint.kv_subject()
        name = _name_of(subject)
        self._due[name] = due = asyncio.Event()
        self.count_events(subject, 0)
        while True:
            await due.wait()
            due.clear()
            self._events[name] = 0
            try:
                async with asyncio.timeout(_SNAPSHOT_S):
                    await self._compact(subject, endpoint, reader)
            except (DynamoError, ValueError, RecursionError, TimeoutError) as error:
                log.warning("no snapshot of the KV caches of %s: %s", endpoint, str(error) or "it takes too long")

    async def _compact(self, subject: str, endpoint: Endpoint, reader: CacheReader) -> None:
        name = _name_of(subject)
        async with self._record.lock(name) as ours:
            if not ours or await self._record.count(subject) < self._threshold:
                return  # a peer frontend is making one, or just did
            old = await self._archive(name)
            last = old.sequence
            recorded: dict[Key, list[KvUpdate]] = {}
            async with aclosing(self._since(subject, old.sequence)) as batches:
                async for sequence, events in batches:
                    last = sequence
                    for key, update in events:
                        recorded.setdefault(key, []).append(update)
            before = {(InstanceId(part.instance), part.model): part.snapshot for part in old.parts}
            parts: list[Archived] = []
            for key in sorted(reader.followed(endpoint)):
                snapshot = await self._current_snapshot(key, before.get(key), recorded.get(key, []), reader)
                if snapshot is not None:
                    parts.append(Archived(*key, snapshot))
            data = await asyncio.to_thread(archive_encoder.encode, Archive(last, parts))
            await self._record.save(name, data)
            await self._record.purge(subject, last)
            self.snapshots += 1
            log.info("a snapshot of %d KV caches of %s was made", len(parts), endpoint)

    async def _current_snapshot(
        self, key: Key, before: KvSnapshot | None, updates: list[KvUpdate], reader: CacheReader
    ) -> KvSnapshot | None:
        most = reader.most_blocks(*key)
        if before is None or updates:
            before = await asyncio.to_thread(fold, before, updates, most) or await reader.fetch_snapshot(*key)
        return None if before is None else cut(before, most)

    async def _since(self, subject: str, after: int) -> AsyncGenerator[tuple[int, list[tuple[Key, KvUpdate]]], None]:
        """Yield the recorded events after a number in batches, each with its last number. Unreadable events count as lost."""
        async with aclosing(self._record.since(subject, after)) as batches:
            async for batch in batches:
                events: list[tuple[Key, KvUpdate]] = []
                for _, source, payload in batch:
                    try:
                        message = read_message(payload)
                        events.append(((instance_of(source), message.model), message.update))
                    except (ValueError, RecursionError) as error:
                        log.debug("a recorded KV event on %s cannot be read: %s", source, error)
                yield batch[-1][0], events

    async def _archive(self, name: str) -> Archive:
        data = await self._record.load(name)
        return Archive() if data is None else await asyncio.to_thread(archive_decoder.decode, data)


def _name_of(subject: str) -> str:
    """Return the subject without the instance: the name of a component's record, its snapshot and its lock."""
    return subject.rpartition(".")[0]
