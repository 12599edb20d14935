"""The usage ledger in JetStream: one record for each process and day, which that process alone writes, whole.

Since a record has totals, one that is written twice counts once; and no process waits for another one. A reader adds up
the records of all processes. A process that is killed takes along what it has not saved: `SAVE_S` of it, or more if the record
is large.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.records import RecordStore
from dynamo.common.names import encode
from dynamo.common.process.background import running
from dynamo.frontend.security.ledger import Ledger, Row

log = logging.getLogger(__name__)

SAVE_S = 2.0
_ROWS_PER_S = 500
"""Rows that are written per second, on average."""
_READS_AT_ONCE = 16
_decoder = msgspec.json.Decoder(list[Row])


class UsageStore:
    """Saves the ledger of this process, and reads those of all; use `open_usage`."""

    def __init__(self, records: RecordStore, ledger: Ledger, namespace: str, origin: str) -> None:
        self._records = records
        self._ledger = ledger
        self._prefix = encode(namespace, "namespace")
        self._origin = origin
        self._saving = asyncio.Lock()
        self._forgotten: Counter[str] = Counter()
        """How often a day was forgotten, which was saved then."""

    async def keep_saving(self) -> None:
        """Save what changes, until cancelled."""
        is_failing = False
        while True:
            await asyncio.sleep(max(SAVE_S, self._ledger.row_count / _ROWS_PER_S))
            try:
                await self.save()
                is_failing = False
            except Unavailable as error:
                if not is_failing:
                    log.warning("the usage of keys is not saved for now: %s", error)
                is_failing = True

    async def save(self) -> None:
        """Save the days that have changed. Raises Unavailable."""
        async with self._saving:
            for day in list(self._ledger.unsaved):
                del self._ledger.unsaved[day]
                try:
                    await self._records.put(self._key(day), msgspec.json.encode(self._ledger.rows(day)))
                except BaseException:
                    self._ledger.unsaved[day] = None
                    raise
                if day != self._ledger.today() and day not in self._ledger.unsaved:
                    self._ledger.forget(day)
                    self._forgotten[day] += 1

    def _key(self, day: str) -> str:
        """Return the key of a day's record, which is another one if the clock was set back to a day that was forgotten."""
        times = self._forgotten[day]
        return f"{self._prefix}.{day}.{self._origin}" + (f"-{times}" if times else "")

    async def read(self, first_day: str, last_day: str) -> list[Row]:
        """Return what was used on some days, by all processes, in order of day, key and model. Raises Unavailable."""
        await self.save()
        keys = await self._records.keys(f"{self._prefix}.>")
        keys = [key for key in keys if first_day <= key.split(".")[1] <= last_day]
        rows: dict[tuple[str, str, str], Row] = {}
        for start in range(0, len(keys), _READS_AT_ONCE):
            records = await asyncio.gather(*map(self._records.get, keys[start : start + _READS_AT_ONCE]))
            for record in records:
                for row in () if record is None else _decoder.decode(record.value):
                    total = rows.setdefault((row.day, row.key, row.model), row)
                    if total is not row:
                        total.add(row)
        return [rows[key] for key in sorted(rows)]


@asynccontextmanager
async def open_usage(records: RecordStore, ledger: Ledger, namespace: str, origin: str) -> AsyncIterator[UsageStore]:
    """Save the ledger while the body runs, and once more at its end."""
    store = UsageStore(records, ledger, namespace, origin)
    try:
        async with running(store.keep_saving(), "usage"):
            yield store
    finally:
        try:
            await store.save()
        except Unavailable as error:
            log.warning("the last usage of keys is not saved: %s", error)
