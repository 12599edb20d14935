"""A batch, its lines, and where both lie in JetStream.

The lines are run in segments. The results of a segment are one record that is written once, by whichever frontend ran it: so a
line that was carried out twice, because a frontend died or lost its lease, is in the output once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Literal
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from dynamo.common.errors import InvalidRequest, PayloadTooLarge, RateLimited, Unavailable
from dynamo.common.process.work import Hold
from dynamo.frontend.api.openai.batches.index import Index
from dynamo.frontend.api.openai.batches.segments import RequestCounts, Segment, decode_segment, encode_segment, writer_of
from dynamo.frontend.api.openai.store.owned import OwnedRecords, Storage

MAX_LINES = 50_000
MAX_WAITING = 100
"""Batches of one key that have not ended: every frontend reads all of them each few seconds."""
SEGMENT_LINES = 64
MAX_ENDED = 2
"""Frontends that ended at a line, after which it is carried out no further: it may be what ended them."""
MAX_ENDED_FRONTENDS = 3
"""Frontends that ended while they carried out a batch, after which it is carried out no further."""
ALONE_AFTER = 2
"""Frontends that ended while they carried out a batch, after which all its lines are carried out one by one."""
LOST_S = 30.0
"""A frontend without its lease that has not said for so long that it goes on with a batch has ended."""
WINDOW_S = 86_400
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MAX_PROBLEMS = 20
_BLOCK_BYTES = 64 * 1024
"""So much of a file is looked at in one call, which keeps the interpreter from other threads."""
_UNSET = frozenset({b"", b"null", b"false"})
_ATTEMPTS = 5
_WRITES = 3
"""Attempts to keep the results of a segment: more would not help if the store has no room for them."""
READY_S = 1.0
"""How often it is looked whether a store that has failed takes writes again."""

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class Problem(Struct, frozen=True):
    """Why a batch cannot be carried out."""

    message: str
    line: int | None = None
    code: str = "invalid_request"
    param: str | None = None


class Problems(Struct, frozen=True):
    data: list[Problem]
    object: Literal["list"] = "list"


class Batch(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Problems | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchLine(Struct, frozen=True, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw
    """Not parsed: the endpoint does that."""


class _ForbiddenFlags(Struct, frozen=True):
    """What a body must not ask for."""

    stream: Raw = Raw()
    background: Raw = Raw()

    @property
    def are_set(self) -> bool:
        return any(bytes(flag) not in _UNSET for flag in (self.stream, self.background))


class Lines(Struct, frozen=True):
    """Lines in a row, by their positions in the batch."""

    first: int
    end: int

    def overlap(self, other: Lines) -> bool:
        return self.first < other.end and other.first < self.end

    @property
    def is_one(self) -> bool:
        return self.end - self.first == 1


class Begun(Struct, frozen=True):
    """What a frontend carries out at once. If another frontend finds this, the first one has ended meanwhile."""

    lines: Lines
    by: str
    """A token of the frontend."""


class Owned(Struct, frozen=True):
    owner: str
    """The name of the API key; empty without one."""
    batch: Batch
    attempts: int = 0
    """How often the segment that comes next was begun."""
    results_bytes: int = 0
    """Bytes of the results that are kept and not in files yet."""
    begun: Begun | None = None
    ended_at: tuple[Lines, ...] = ()
    """The lines that frontends were carrying out when they ended: those of the segment that comes next, and single ones of all
    segments."""
    by: str = ""
    """A token of the frontend that carries it out, or has ended while it did; empty: none does."""
    is_unleased: bool = False
    """The frontend goes on without its lease, and writes this again every few seconds."""
    ended: int = 0
    """How many frontends ended while they carried it out, whatever they did for it then."""

    @property
    def id(self) -> str:
        return self.batch.id

    @property
    def created_at(self) -> int:
        return self.batch.created_at

    def is_suspect(self, lines: Lines) -> bool:
        """Return whether some of the lines may be what ends frontends, and all of them are to be carried out one by one."""
        return self.ended >= ALONE_AFTER or any(ended.overlap(lines) for ended in self.ended_at)

    def ends_frontends(self, lines: Lines) -> bool:
        """Return whether one of the lines is not to be carried out again, since frontends ended at it."""
        return sum(ended.overlap(lines) for ended in self.ended_at) >= MAX_ENDED


class Waiting(Struct, frozen=True, kw_only=True):
    """A batch that has not ended."""

    owner: str
    id: str
    since: int
    """Unix time, seconds."""


class TakenOver(Unavailable):
    """Another frontend carries the batch out."""

    def __init__(self) -> None:
        super().__init__("another frontend carries it out")


class InvalidBatch(Exception):
    """The lines of a batch cannot be carried out."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems[0].message)
        self.problems = problems


_lines = msgspec.json.Decoder(BatchLine)
_flags = msgspec.json.Decoder(_ForbiddenFlags)
_waiting = msgspec.json.Decoder(Waiting)
_owned = msgspec.json.Decoder(Owned)


def parse_lines(content: bytes, endpoint: str, max_line_bytes: int) -> list[BatchLine]:
    """Return the lines of an input file, whose requests are no copies of it. Raises InvalidBatch.

    A longer line than `max_line_bytes` is not looked into, nor what follows it.
    """
    problems: list[Problem] = []
    lines: dict[str, BatchLine] = {}
    for number, (text, is_blank) in enumerate(_split(content, max_line_bytes), 1):
        if number > 2 * MAX_LINES or len(lines) > MAX_LINES:
            problems.append(Problem(f"the file has more than {MAX_LINES} lines", code="too_many_tasks"))
            break
        if is_blank:
            continue
        try:
            if len(text) > max_line_bytes:
                raise _Invalid(f"the line has more than {max_line_bytes} bytes", "line_too_long")
            line = _parse_line(text, endpoint)
            if line.custom_id in lines:
                raise _Invalid(f"the 'custom_id' {line.custom_id[:80]!r} occurs twice", "duplicate_custom_id")
            lines[line.custom_id] = line
        except _Invalid as error:
            problems.append(Problem(str(error), number, error.code))
            if len(problems) == _MAX_PROBLEMS:
                break
    if len(lines) > MAX_LINES and not problems:
        problems.append(Problem(f"the file has more than {MAX_LINES} lines", code="too_many_tasks"))
    if not lines and not problems:
        problems.append(Problem("the file has no lines", code="empty_file"))
    if problems:
        raise InvalidBatch(problems)
    return list(lines.values())


def _split(content: bytes, max_line_bytes: int) -> Iterator[tuple[memoryview, bool]]:
    """Yield the lines without their ends, each with whether it is blank; the first one that is too long is the last."""
    view, begin, end, is_blank = memoryview(content), 0, 0, True
    while end < len(content):
        block = content[end : end + _BLOCK_BYTES]
        if block.endswith(b"\r") and content.startswith(b"\n", end + len(block)):
            block += b"\n"
        for piece in block.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            is_blank = is_blank and (not text or text.isspace())
            end += len(piece)
            text_end = end - len(piece) + len(text)
            if text_end - begin > max_line_bytes:
                yield view[begin:text_end], False
                return
            if len(text) < len(piece):
                yield view[begin:text_end], is_blank
                begin, is_blank = end, True
    if begin < end:
        yield view[begin:], is_blank


class _Invalid(Exception):
    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def _parse_line(text: memoryview, endpoint: str) -> BatchLine:
    try:
        line = _lines.decode(text)
        flags = _flags.decode(line.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Invalid(f"the line is not a request: {str(error)[:200]}", "invalid_json_line") from None
    if line.url != endpoint:
        raise _Invalid(f"'url' is {line.url[:80]!r}; the batch is for {endpoint}", "mismatched_url")
    if flags.are_set:
        raise _Invalid("'stream' and 'background' are not allowed in batches", "invalid_body")
    return line


class Batches:
    """The batches of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._records = storage.records
        self._quota = storage.quota
        self._quota.count_by(self._bytes_of)
        self._batches = OwnedRecords(storage, "batch", "batch_", _owned.decode, folder="batch")
        self._waiting = OwnedRecords(storage, "batch", "batch_", _waiting.decode, folder="waiting")
        self._index = Index(storage.records, self._batches)
        self._creating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By owner, while it makes batches."""

    @property
    def now(self) -> int:
        return int(self._storage.clock())

    async def create(self, owner: str, endpoint: str, input_file: str, metadata: dict[str, str] | None) -> Batch:
        """Make a batch, which waits to be carried out. Raises RateLimited, PayloadTooLarge."""
        async with self._creating.setdefault(owner, asyncio.Lock()):  # a burst is counted one by one
            return await self._create(owner, endpoint, input_file, metadata)

    async def _create(self, owner: str, endpoint: str, input_file: str, metadata: dict[str, str] | None) -> Batch:
        if len(await self._records.keys(self._waiting.pattern(owner))) >= MAX_WAITING:
            raise RateLimited(f"there are {MAX_WAITING} batches that have not ended; wait for some, or cancel them")
        batch = Batch(
            id=self._batches.new_id(),
            endpoint=endpoint,
            input_file_id=input_file,
            created_at=self.now,
            expires_at=self.now + WINDOW_S,
            metadata=metadata,
        )
        # In this order, a batch that exists is carried out, and what waits in vain, because the second write failed, is dropped.
        waiting = msgspec.json.encode(Waiting(owner=owner, id=batch.id, since=self.now))
        data = msgspec.json.encode(Owned(owner, batch))
        async with self._quota.room(owner, len(data)):
            await self._records.put(self._waiting.key(owner, batch.id), waiting, last=0)
            await self._records.put(self._batches.key(owner, batch.id), data, last=0)
            self._quota.add(owner, len(data))
        return batch

    async def read(self, owner: str, id: str) -> Batch:
        """Raises RecordNotFound."""
        return (await self._batches.load(owner, id)).value.batch

    async def may_store(self, owner: str) -> bool:
        """Return whether a key may store more, or that cannot be known."""
        try:
            await self._quota.check(owner)
        except PayloadTooLarge:
            return False
        except Unavailable:
            pass
        return True

    def room(self, owner: str, size_bytes: int) -> AbstractAsyncContextManager[object]:
        """Keep room for results until they are kept; see `StoredBytes.room`."""
        return self._quota.room(owner, size_bytes)

    async def change(self, owner: str, id: str, change: Callable[[Batch], Batch], *, filed_bytes: int = 0) -> Batch:
        """Replace a batch that has not ended by `change` of it as it is then. Raises RecordNotFound, InvalidRequest.

        `filed_bytes` of its results are in files now, and go on to count.
        """

        def changed(owned: Owned) -> Owned:
            batch = change(owned.batch)
            return owned if batch is owned.batch else replace(owned, batch=batch)

        return (await self._change(owner, id, changed, filed_bytes)).batch

    async def take_over(self, owner: str, id: str, by: str) -> Owned:
        """Let a frontend carry a batch out, which has its lease; note what another one did for it that has ended meanwhile.

        Raises RecordNotFound, and TakenOver while another one goes on without its lease.
        """
        record = await self._batches.load(owner, id)
        is_silent = record.value.is_unleased and await self._records.age_s(record.written_at) >= LOST_S

        def taken(owned: Owned) -> Owned:
            if owned.is_unleased and owned.by != by and not is_silent:
                raise TakenOver
            before = owned.by or (owned.begun.by if owned.begun is not None else "")  # the latter of an earlier version
            if before not in ("", by):
                ended_at = owned.ended_at if owned.begun is None else (*owned.ended_at, owned.begun.lines)
                owned = replace(owned, ended_at=ended_at, ended=owned.ended + 1)
            return replace(owned, begun=None, by=by, is_unleased=False)

        return await self._change(owner, id, taken)

    async def go_on(self, owner: str, id: str, by: str, *, is_unleased: bool) -> None:
        """Note that a frontend goes on, with or without its lease. Raises RecordNotFound, TakenOver."""
        await self._change_by(by, owner, id, lambda owned: replace(owned, is_unleased=is_unleased))

    async def attempt(self, owner: str, id: str, by: str, lines: Lines | None) -> int:
        """Count an attempt to carry out a segment; return how many there were since one was carried out.

        `lines`: those that are carried out at once from now on. Raises RecordNotFound, TakenOver.
        """
        begun = None if lines is None else Begun(lines, by)
        changed = await self._change_by(by, owner, id, lambda owned: replace(owned, attempts=owned.attempts + 1, begun=begun))
        return changed.attempts

    async def begin(self, owner: str, id: str, by: str, lines: Lines | None) -> None:
        """Note which lines are carried out at once from now on. Raises RecordNotFound, TakenOver."""
        begun = None if lines is None else Begun(lines, by)
        await self._change_by(by, owner, id, lambda owned: replace(owned, begun=begun))

    async def stop(self, owner: str, id: str, by: str, max_attempts: int | None = None) -> None:
        """Note that a frontend carries a batch out no more, in good order. Raises RecordNotFound.

        `max_attempts`: how many attempts at the next segment count, without its own; None: all do.
        """

        def stopped(owned: Owned) -> Owned:
            if owned.by != by:
                return owned
            attempts = owned.attempts if max_attempts is None else min(owned.attempts, max_attempts)
            return replace(owned, begun=None, by="", is_unleased=False, attempts=attempts)

        await self._change(owner, id, stopped)

    async def succeeded(self, owner: str, id: str, by: str, results_bytes: int, change: Callable[[Batch], Batch]) -> Batch:
        """Do as `change` after an attempt that succeeded; there are results of so many bytes by now. Raises as `attempt` does."""

        def changed(owned: Owned) -> Owned:
            ended_at = tuple(ended for ended in owned.ended_at if ended.is_one)
            batch = change(owned.batch)
            return replace(owned, batch=batch, attempts=0, results_bytes=results_bytes, begun=None, ended_at=ended_at)

        return (await self._change_by(by, owner, id, changed)).batch

    async def _change_by(self, by: str, owner: str, id: str, change: Callable[[Owned], Owned]) -> Owned:
        """Change a batch for the frontend that carries it out."""

        def changed(owned: Owned) -> Owned:
            if owned.by != by:
                raise TakenOver
            return change(owned)

        return await self._change(owner, id, changed)

    async def _change(self, owner: str, id: str, change: Callable[[Owned], Owned], filed_bytes: int = 0) -> Owned:
        for _ in range(_ATTEMPTS):
            record = await self._batches.load(owner, id)
            owned = record.value
            changed = owned if owned.batch.status in ENDED else change(owned)
            if changed is owned:
                return owned
            if changed.batch.status in ENDED:  # its results are in files, or are dropped
                changed = replace(changed, results_bytes=0)
            data = msgspec.json.encode(changed)
            if await self._records.put(self._batches.key(owner, id), data, last=record.revision) is not None:
                self._quota.add(owner, changed.results_bytes - owned.results_bytes + filed_bytes)
                return changed
        raise InvalidRequest(f"batch '{id}' changes too fast; try again")

    async def owned_by(self, owner: str) -> Sequence[Batch]:
        """Return all batches of a key, the newest first."""
        return [owned.value.batch for owned in await self._index.of(owner)]

    async def waiting(self) -> list[Waiting]:
        """Return the batches that have not ended, and some that never came to be."""
        return [_waiting.decode(record) for record in (await self._records.values(self._storage.key("waiting.>"))).values()]

    async def done(self, owner: str, id: str) -> None:
        """Delete what is kept of a batch that has ended, apart from the batch."""
        for key in await self._records.keys(self._segment_key(id, "*")):
            await self._records.delete(key)
        await self._records.delete(self._waiting.key(owner, id))

    async def segments(self, id: str, hold: Hold) -> dict[int, Segment]:
        """Return the results that there are, by the number of the segment; `hold` as for `RecordStore.get`."""
        segments: dict[int, Segment] = {}
        for key in await self._records.keys(self._segment_key(id, "*")):
            record = await self._records.get(key, hold)
            if record is not None:
                hold(len(record.value))
                segments[int(key.rpartition(".")[2])] = await decode_segment(record.value)
        return segments

    async def put_segment(self, owner: str, id: str, by: str, number: int, segment: Segment) -> bool:
        """Keep the results of a segment, unless there are some, or another frontend carries the batch out.

        Return whether those that are there are these. nats-server may do later what it did not respond to in time: so that is
        tried again when the store takes writes, until it is known what became of it. Raises RecordNotFound.
        """
        key, writer = self._segment_key(id, str(number)), secrets.token_hex(8)
        record, failure = await encode_segment(segment, writer), Unavailable("the results are not kept")
        for _ in range(_WRITES):
            try:
                is_ours = (await self._batches.load(owner, id)).value.by == by
                if is_ours and await self._records.put(key, record, last=0) is not None:
                    return True
                return await self._writer_of(key) == writer
            except Unavailable as error:
                failure = error
            await self._until_ready()
        if await self._writer_of(key) == writer:
            return True
        raise failure

    async def _until_ready(self) -> None:
        """Return when the store, which has failed, takes what is written."""
        while True:
            await asyncio.sleep(READY_S)
            if self._records.is_ready:
                return

    async def _writer_of(self, key: str) -> str:
        """Return the token of the one that wrote the results of a segment; empty if there are none."""
        content = await self._records.open(key)
        return "" if content is None else await writer_of(content)

    async def _bytes_of(self, owner: str) -> int:
        return sum(owned.size_bytes + owned.value.results_bytes for owned in await self._index.of(owner))

    def _segment_key(self, id: str, number: str) -> str:
        return self._storage.key(f"segment.{id}.{number}")


def result_file_id(batch: str, kind: str) -> str:
    """Return the id of a batch's output or error file: the same at every frontend."""
    return f"file-{hashlib.sha256(f'{batch} {kind}'.encode()).hexdigest()[:32]}"
