"""The past of a component's KV caches, as recorded: a snapshot, and the events since.

A frontend that starts reads both, and need not ask the instances. Once enough events have come, one frontend of all makes a new
snapshot: the old one with the recorded events applied, so that it holds just what the record says up to one place. Then the
record is cut there. Instances that are gone are left out. Where the record has a hole, the instance is asked.

Nothing depends on any of it: what cannot be read is asked for, as without a history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import KvSnapshot, KvUpdate, read_message
from dynamo.common.names import Endpoint, InstanceId, instance_of
from dynamo.frontend.fleet.kv_archive import Archive, Archived, archive_decoder, archive_encoder, fold

log = logging.getLogger(__name__)

Key = tuple[InstanceId, str]
"""An instance and a model."""

_READ_S = 1.0
"""Longer, and asking the instances is quicker. They are asked only for what was not read by then."""
_SNAPSHOT_S = 40.0
"""Below the life of the lock under which a snapshot is made."""


class Record(Protocol):
    """Where events and snapshots are kept; `messaging.kv_stream.KvStream` is one. Methods raise Unavailable."""

    async def count(self, subject: str) -> int: ...

    def since(self, subject: str, after: int) -> AsyncGenerator[list[tuple[int, str, bytes]], None]: ...

    async def purge(self, subject: str, up_to: int | None = None) -> None: ...

    async def load(self, name: str) -> bytes | None: ...

    async def save(self, name: str, snapshot: bytes) -> None: ...

    async def forget(self, name: str) -> None: ...

    def lock(self, name: str) -> AbstractAsyncContextManager[bool]: ...


class Reader(Protocol):
    """Who wants to know the past; the `KvFeed`."""

    def known(self, endpoint: Endpoint) -> set[Key]: ...

    def remembered(self, instance: InstanceId, model: str, snapshot: KvSnapshot) -> None: ...

    def told(self, instance: InstanceId, model: str, update: KvUpdate) -> None: ...

    async def whole(self, instance: InstanceId, model: str) -> KvSnapshot | None: ...


class KvHistory:
    """`snapshot_threshold`: recorded events after which a snapshot is due. `reset`: begin by forgetting what is recorded."""

    def __init__(self, record: Record, *, snapshot_threshold: int = 10_000, reset: bool = False) -> None:
        self._record = record
        self._threshold = snapshot_threshold
        self._reset = reset
        self._heard: dict[str, int] = {}
        """Events since the last snapshot, as far as this frontend knows, by the subject without the instance."""
        self._due: dict[str, asyncio.Event] = {}
        self.snapshots = 0
        """How many this frontend made."""

    def heard(self, subject: str, events: int = 1) -> None:
        """Events came in on a subject."""
        name = _name_of(subject)
        self._heard[name] = heard = self._heard.get(name, 0) + events
        if heard >= self._threshold and (due := self._due.get(name)) is not None:
            due.set()

    async def read(self, endpoint: Endpoint, reader: Reader) -> None:
        """Tells `reader` what is recorded of a component. Gives up, silently for it, when that cannot be had or takes long."""
        try:
            async with asyncio.timeout(_READ_S):
                await self._read(endpoint, reader)
        except TimeoutError:
            log.warning("the recorded KV events of %s take too long to read: instances are asked for the rest", endpoint)
        except (DynamoError, ValueError) as error:
            log.warning("the recorded KV events of %s cannot be used, so instances are asked: %s", endpoint, error)

    async def _read(self, endpoint: Endpoint, reader: Reader) -> None:
        subject = endpoint.kv_subject()
        name = _name_of(subject)
        if self._reset:
            await self._record.purge(subject)
            await self._record.forget(name)
            return
        archive = await self._archive(name)
        for part in archive.parts:
            reader.remembered(InstanceId(part.instance), part.model, part.snapshot)
            await asyncio.sleep(0)  # a large one takes a millisecond
        async with aclosing(self._since(subject, archive.sequence)) as batches:
            async for _, events in batches:
                for (instance, model), update in events:
                    reader.told(instance, model, update)
                self.heard(subject, len(events))

    async def keep_short(self, endpoint: Endpoint, reader: Reader) -> None:
        """Makes a snapshot whenever one is due, forever."""
        subject = endpoint.kv_subject()
        name = _name_of(subject)
        self._due[name] = due = asyncio.Event()
        self.heard(subject, 0)
        while True:
            await due.wait()
            due.clear()
            self._heard[name] = 0
            try:
                async with asyncio.timeout(_SNAPSHOT_S):
                    await self._shorten(subject, endpoint, reader)
            except (DynamoError, ValueError, TimeoutError) as error:
                log.warning("no snapshot of the KV caches of %s: %s", endpoint, str(error) or "it takes too long")

    async def _shorten(self, subject: str, endpoint: Endpoint, reader: Reader) -> None:
        name = _name_of(subject)
        async with self._record.lock(name) as ours:
            if not ours or await self._record.count(subject) < self._threshold:
                return  # a sibling makes one, or just did
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
            for key in sorted(reader.known(endpoint)):
                snapshot = await self._now(key, before.get(key), recorded.get(key, []), reader)
                if snapshot is not None:
                    parts.append(Archived(*key, snapshot))
            data = await asyncio.to_thread(archive_encoder.encode, Archive(last, parts))
            await self._record.save(name, data)
            await self._record.purge(subject, last)
            self.snapshots += 1
            log.info("a snapshot of %d KV caches of %s was made", len(parts), endpoint)

    async def _now(self, key: Key, before: KvSnapshot | None, updates: list[KvUpdate], reader: Reader) -> KvSnapshot | None:
        if before is not None and not updates:
            return before
        return await asyncio.to_thread(fold, before, updates) or await reader.whole(*key)

    async def _since(self, subject: str, after: int) -> AsyncGenerator[tuple[int, list[tuple[Key, KvUpdate]]], None]:
        """Recorded events past a number, in batches, each with its last number. One that cannot be read is as if it were lost."""
        async with aclosing(self._record.since(subject, after)) as batches:
            async for batch in batches:
                events: list[tuple[Key, KvUpdate]] = []
                for _, source, payload in batch:
                    try:
                        message = read_message(payload)
                        events.append(((instance_of(source), message.model), message.update))
                    except ValueError as error:
                        log.debug("a recorded KV event on %s cannot be read: %s", source, error)
                yield batch[-1][0], events

    async def _archive(self, name: str) -> Archive:
        data = await self._record.load(name)
        return Archive() if data is None else await asyncio.to_thread(archive_decoder.decode, data)


def _name_of(subject: str) -> str:
    """The subject without the instance names a component's record, its snapshot and its lock."""
    return subject.rpartition(".")[0]
