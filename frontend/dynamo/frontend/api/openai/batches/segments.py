"""The results of some lines in a row, and the record that has them.

The record says who wrote it, so that a frontend whose write got no response in time knows whether the record is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from io import BytesIO

import msgspec
from msgspec import Struct

from dynamo.common.messaging.jetstream.records import RecordContent
from dynamo.frontend.api.openai.batches.long_texts import position, unescaped, write_escaped

_OUTPUTS, _ERRORS, _COUNTS = b'{"outputs":"', b'","errors":"', b'","counts":'
"""What stands around the parts of the record of a segment, and within none of them, where quotes are escaped."""
_TAIL_BYTES = 1024
"""The counts are within so many bytes at the end."""


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Segment(Struct, frozen=True):
    """The results of some lines in a row, as they are in the files: in UTF-8, since a text takes four bytes for each character
    as soon as one of them is an emoji."""

    outputs: bytes
    errors: bytes
    counts: RequestCounts
    """`total` is that of the segment; lines that were not carried out, since the batch was cancelled, are in no other one."""

    @property
    def is_complete(self) -> bool:
        return self.counts.completed + self.counts.failed == self.counts.total

    @property
    def size_bytes(self) -> int:
        """What it adds to the files."""
        return len(self.outputs) + len(self.errors)


class _Counts(RequestCounts, frozen=True):
    """The counts in a record, with what earlier versions do not know, and leave out of account."""

    by: str = ""
    """A token of who wrote the record."""


_counts = msgspec.json.Decoder(_Counts)


async def encode_segment(segment: Segment, by: str) -> bytes:
    """Return the record of a segment, which is written by the owner of a token."""
    record, counts = BytesIO(), segment.counts
    record.write(_OUTPUTS)
    await write_escaped(segment.outputs, record)
    record.write(_ERRORS)
    await write_escaped(segment.errors, record)
    record.write(_COUNTS + msgspec.json.encode(_Counts(counts.total, counts.completed, counts.failed, by)) + b"}")
    return record.getvalue()


async def decode_segment(record: bytes) -> Segment:
    counts = await position(record, _COUNTS, len(record))
    errors = await position(record, _ERRORS, counts)
    kept = _counts_at(record, counts)
    return Segment(
        await unescaped(record, len(_OUTPUTS), errors),
        await unescaped(record, errors + len(_ERRORS), counts),
        RequestCounts(kept.total, kept.completed, kept.failed),
    )


async def writer_of(content: RecordContent) -> str:
    """Return the token of who wrote the record of a segment; empty if an earlier version did."""
    tail = b""
    async with aclosing(content.pieces) as pieces:
        async for piece in pieces:
            tail = (tail + piece)[-_TAIL_BYTES:]
    return _counts_at(tail, tail.rindex(_COUNTS)).by


def _counts_at(record: bytes, position: int) -> _Counts:
    return _counts.decode(record[position + len(_COUNTS) : -1])


def is_full(done: Mapping[int, Segment], max_bytes: int) -> bool:
    """Return whether results did not fit: lines were not carried out, though the batch was not cancelled."""
    size_bytes = sum(segment.size_bytes for segment in done.values())
    return size_bytes > max_bytes or not all(segment.is_complete for segment in done.values())
