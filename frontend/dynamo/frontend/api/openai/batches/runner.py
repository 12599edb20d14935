"""Carries out batches: each by the frontend that holds its lease, line by line through the handlers that serve requests.

A frontend that dies leaves its lease to another one, which goes on with the segments that have no results yet. Lines have the
lowest priority, and wait while the fleet or the key's limits refuse them. Whatever changes a batch from outside, as cancelling
does, is seen when the next segment has its results.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from dynamo.common.asgi import Message
from dynamo.common.background import Tasks, awaited
from dynamo.common.errors import DynamoError, Unauthenticated, Unavailable
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.batches.batch import (
    ENDED,
    SEGMENT_LINES,
    Batch,
    Batches,
    BatchNotFound,
    InvalidBatch,
    Line,
    Problem,
    Problems,
    RequestCounts,
    Segment,
    Waiting,
    parse_lines,
    result_file_id,
)
from dynamo.frontend.api.openai.batches.files import FileNotFound, Files
from dynamo.frontend.fleet.leases import Leases
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.fair_slots import FairSlots

log = logging.getLogger(__name__)

MAX_BATCHES = 4
"""That one process carries out at a time."""
SHARED_BATCHES = 2
"""While so many are carried out, a key that has one begins no other here: the rest are for other keys."""
LINES_AT_ONCE = 64
"""Of all its batches; those of several keys in turn."""
MAX_RESULT_CHARS = 64 << 20
"""Of one batch, after which no further segment is carried out: the results are put together in memory."""
POLL_S = 5.0
CREATED_WITHIN_S = 120
"""After a batch waits, its record is written; otherwise it will never be."""
_REFUSED = frozenset({429, 503, 529})
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_RETRIES = 20
_PRIORITY = b"-1000"

FindAccount = Callable[[str], Account]
"""Returns the account of a key by its name. Raises Unauthenticated if there is no such key any more."""


class BatchRunner:
    """That of one process; `run` carries out what it gets."""

    def __init__(
        self,
        files: Files,
        batches: Batches,
        leases: Callable[[], Leases],
        operations: Mapping[str, Operation],
        settings: HttpSettings,
        account: FindAccount,
        metrics: FrontendMetrics,
    ) -> None:
        """`operations` are those of the endpoints that lines may name; `leases` raises Unavailable until there is etcd."""
        self._files = files
        self._batches = batches
        self._leases = leases
        self._operations = operations
        self._settings = settings
        self._account = account
        self._metrics = metrics
        self._tasks = Tasks()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}
        """Of the batches that are carried out here."""
        self._lines = FairSlots(LINES_AT_ONCE)
        self._poke = asyncio.Event()

    def poke(self) -> None:
        """Look for batches now: there is a new one."""
        self._poke.set()

    async def run(self) -> None:
        """Carry out batches until cancelled; then others may go on with them at once."""
        try:
            self._leases().on_lost(self._stop_all)
            while True:
                self._poke.clear()
                try:
                    await self._look()
                except DynamoError as error:
                    log.debug("batches could not be looked for: %s", error)
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._poke.wait()
                except TimeoutError:
                    pass
        finally:
            await self._tasks.close()

    async def _look(self) -> None:
        for waiting in await self._batches.waiting():
            owner, id = waiting.owner, waiting.id
            if len(self._running) >= MAX_BATCHES:
                return
            if id in self._running or (owner in self._owners.values() and len(self._running) >= SHARED_BATCHES):
                continue
            if await self._leases().take(id):
                self._owners[id] = owner
                self._running[id] = self._tasks.start(self._carry_out(waiting), f"batch {id}")

    def _stop_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _carry_out(self, waiting: Waiting) -> None:
        owner, id = waiting.owner, waiting.id
        try:
            log.info("batch %s is carried out here", id)
            batch = await self._batches.read(owner, id)
            if batch.status not in ENDED:
                batch = await self._worked_on(owner, batch)
            self._metrics.batch_ended(batch.status)
            await self._batches.done(owner, id)
            self.poke()  # there is room for another one
        except BatchNotFound:
            if self._batches.now - waiting.since > CREATED_WITHIN_S:
                await self._batches.done(owner, id)
        except DynamoError as error:
            log.warning("batch %s stops for now: %s", id, error)
        finally:
            del self._running[id], self._owners[id]
            try:
                await self._leases().release(id)
            except DynamoError as error:
                log.debug("the lease of batch %s could not be given back: %s", id, error)

    async def _worked_on(self, owner: str, batch: Batch) -> Batch:
        """Return the batch at its end."""
        now = self._batches.now
        try:
            account = self._account(owner)
            content = await self._files.content(owner, batch.input_file_id)
            lines = await self._settings.offload.run(parse_lines, content, batch.endpoint)
        except InvalidBatch as error:
            return await self._failed(owner, batch, error.problems)
        except (FileNotFound, Unauthenticated) as error:
            return await self._failed(owner, batch, [Problem(str(error))])

        def started(batch: Batch) -> Batch:
            batch = replace(batch, request_counts=replace(batch.request_counts, total=len(lines)))
            return replace(batch, status="in_progress", in_progress_at=now) if batch.status == "validating" else batch

        batch = await self._batches.change(owner, batch.id, started)
        done = await self._batches.segments(batch.id)
        for number in range(-(-len(lines) // SEGMENT_LINES)):
            if batch.status != "in_progress" or self._batches.now >= batch.expires_at or _is_full(done):
                break
            if number not in done:
                done[number] = await self._segment(account, batch, number, lines)
                batch = await self._count(owner, batch, [segment.counts for segment in done.values()])
        return batch if batch.status in ENDED else await self._finish(owner, batch, lines, done)

    async def _count(self, owner: str, batch: Batch, counts: Collection[RequestCounts]) -> Batch:
        completed, failed = sum(each.completed for each in counts), sum(each.failed for each in counts)

        def counted(batch: Batch) -> Batch:
            return replace(batch, request_counts=RequestCounts(batch.request_counts.total, completed, failed))

        return await self._batches.change(owner, batch.id, counted)

    async def _finish(self, owner: str, batch: Batch, lines: Sequence[Line], done: Mapping[int, Segment]) -> Batch:
        """Write the files of a batch, whether or not it has all its results; return it as it is then."""
        missing = [line for number, line in enumerate(lines) if number // SEGMENT_LINES not in done]
        code = _code_of_missing(batch, done)
        texts = {
            "output": "".join(done[number].outputs for number in sorted(done)),
            "error": "".join(
                [*(done[number].errors for number in sorted(done)), *(_result(batch.id, line, None, code) for line in missing)]
            ),
        }
        ids: dict[str, str] = {}
        for kind, text in texts.items():
            if text:
                ids[kind] = result_file_id(batch.id, kind)
                await self._files.put(owner, ids[kind], f"{batch.id}_{kind}.jsonl", "batch_output", text.encode())
        now = self._batches.now

        def ended(batch: Batch) -> Batch:
            batch = replace(batch, output_file_id=ids.get("output"), error_file_id=ids.get("error"), finalizing_at=now)
            if not missing:
                return replace(batch, status="completed", completed_at=now)
            if batch.status == "cancelling":
                return replace(batch, status="cancelled", cancelled_at=now)
            if code == "output_too_large":
                message = f"the results have more than {MAX_RESULT_CHARS} characters; put the other requests into another batch"
                return replace(batch, status="failed", failed_at=now, errors=Problems([Problem(message, code=code)]))
            return replace(batch, status="expired", expired_at=now)

        return await self._batches.change(owner, batch.id, ended)

    async def _failed(self, owner: str, batch: Batch, problems: list[Problem]) -> Batch:
        now = self._batches.now
        return await self._batches.change(
            owner, batch.id, lambda batch: replace(batch, status="failed", failed_at=now, errors=Problems(problems))
        )

    async def _segment(self, account: Account, batch: Batch, number: int, lines: Sequence[Line]) -> Segment:
        """Carry out a segment, keep its results, and return them. Raises Unavailable if others have done so."""
        own = lines[number * SEGMENT_LINES : (number + 1) * SEGMENT_LINES]
        tasks = [awaited(self._line(account, batch, line)) for line in own]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        outputs = [text for is_good, text in results if is_good]
        errors = [text for is_good, text in results if not is_good]
        counts = RequestCounts(len(own), len(outputs), len(errors))
        segment = Segment("".join(outputs), "".join(errors), counts)
        if not await self._batches.put_segment(batch.id, number, segment):
            raise Unavailable("another frontend carries it out")
        self._metrics.batch_lines(completed=counts.completed, failed=counts.failed)
        return segment

    async def _line(self, account: Account, batch: Batch, line: Line) -> tuple[bool, str]:
        """Return whether a line went well, and its result."""
        pause_s = FIRST_PAUSE_S
        operation = self._operations[batch.endpoint]
        for _ in range(_RETRIES):
            async with self._lines.slot(account):
                status, response = await self._call(account, operation, bytes(line.body), _line_id(batch.id, line))
            if status not in _REFUSED or self._batches.now + pause_s >= batch.expires_at:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return status < 400, _result(batch.id, line, (status, response))

    async def _call(self, account: Account, operation: Operation, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Return the status and body of the response to a request that no client sent."""
        pieces: list[bytes] = []
        never = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await never.wait()
            raise AssertionError("the client of a batch never leaves")

        async def send(message: Message) -> None:
            pieces.append(bytes(message.get("body", b"")))

        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id.encode()),
            (b"x-dynamo-request-priority", _PRIORITY),
        ]
        path = operation.path
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        exchange = Exchange(scope, receive, send, self._settings)
        exchange.account, exchange.endpoint, exchange.errors = account, operation.endpoint, operation.errors
        await exchange.run(operation.handle)
        return exchange.status or 500, b"".join(pieces)


def _is_full(done: Mapping[int, Segment]) -> bool:
    return sum(segment.chars for segment in done.values()) > MAX_RESULT_CHARS


def _code_of_missing(batch: Batch, done: Mapping[int, Segment]) -> str:
    """Return why the lines that have no results were not carried out."""
    if batch.status == "cancelling":
        return "batch_cancelled"
    return "output_too_large" if _is_full(done) else "batch_expired"


def _line_id(batch: str, line: Line) -> str:
    return f"batch_req_{hashlib.sha256(f'{batch} {line.custom_id}'.encode()).hexdigest()[:32]}"


def _result(batch: str, line: Line, response: tuple[int, bytes] | None, code: str = "") -> str:
    """Return a line of the output or error file; without a response, one that was not carried out."""
    id = _line_id(batch, line)
    result: dict[str, Any] = {"id": id, "custom_id": line.custom_id, "response": None, "error": None}
    if response is None:
        result["error"] = {"code": code, "message": "the batch ended before this request was carried out"}
    else:
        status, body = response
        result["response"] = {"status_code": status, "request_id": id, "body": Raw(body)}
    return msgspec.json.encode(result).decode() + "\n"
