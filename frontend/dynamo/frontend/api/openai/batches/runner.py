"""Carries out batches: each by the frontend that holds its lease, line by line through the handlers that serve requests.

A frontend that dies leaves its lease to another one, which goes on with the segments that have no results yet. The ledger has
what the lines of a segment used when its results are kept, and so each line once. As a line may be what ended that frontend, the
lines of the segment that it was carrying out are carried out one by one, and one at which a second frontend ends no more; nor is
a batch at which a third one ends. A frontend that has lost its lease and lives goes on with what it carries out, and says so in
the batch's record, since etcd may be what was away. Lines have the lowest priority, and wait while the fleet or the key's limits
refuse them. Whatever changes a batch from outside, as cancelling does, is seen when the next
segment has its results, or while its lines wait for the limits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from msgspec.structs import replace

from dynamo.common.errors import DynamoError, Forbidden, Overloaded, PayloadTooLarge, Unauthenticated, Unavailable
from dynamo.common.etcd.leases import Leases
from dynamo.common.messaging.jetstream.key_values import DamagedRecord
from dynamo.common.process.background import Tasks, awaited, outlasting
from dynamo.common.process.work import Hold
from dynamo.frontend.api.calls import TIMEOUT
from dynamo.frontend.api.declaration import Reads
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.batches.batch import (
    ENDED,
    MAX_ENDED,
    MAX_ENDED_FRONTENDS,
    SEGMENT_LINES,
    Batch,
    Batches,
    BatchLine,
    InvalidBatch,
    Lines,
    Owned,
    Problem,
    Problems,
    TakenOver,
    Waiting,
    parse_lines,
)
from dynamo.frontend.api.openai.batches.batch_key import WAIT_S, BatchKey, FindAccount
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.lines import AdmissionTurns, LineAccount, LineOutcome, LineRequest, LineSlots
from dynamo.frontend.api.openai.batches.long_texts import joined
from dynamo.frontend.api.openai.batches.result_files import NO_FILES, ResultFiles, write_results
from dynamo.frontend.api.openai.batches.result_lines import line_id, result_line
from dynamo.frontend.api.openai.batches.result_room import ResultRoom
from dynamo.frontend.api.openai.batches.segments import RequestCounts, Segment, is_full
from dynamo.frontend.api.openai.store.owned import RecordNotFound
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.queue.fair_slots import FairSlots

log = logging.getLogger(__name__)

MAX_BATCHES, MAX_SLOW = 4, 12
"""Batches that one process carries out at a time, and how many slow ones, of which no line ends, it does not count."""
SHARED_BATCHES = 2
"""A key has so many here. While so many are carried out, one that has a batch begins no other: the rest are for other keys."""
LINES_AT_ONCE = 64
"""Lines of all batches of a process that are carried out at a time; API keys take turns."""
MAX_RESULT_BYTES = 64 << 20
"""Bytes of the results of one batch, after which no further line is carried out: they are put together in memory."""
MAX_ATTEMPTS = 10
"""To carry out a segment, after which its batch fails: it may be what ends frontends, or find no room in the store."""
ALONE_S = 60.0
"""How long a line at which a frontend may have ended is carried out alone."""
POLL_S = 5.0
STOP_S = 2.5
"""How long a frontend that stops may take to keep results that it is about to, and then to write that it stops."""
CREATED_WITHIN_S = 120
"""After a batch waits, its record is written; otherwise it will never be."""
_REFUSED = frozenset({429, 503, 529})
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_RESULTS_PER_STEP = 1000
"""Results of lines that were not carried out, written before other requests have their turn."""
_RETRIES = 20
"""While the fleet refuses a line. For the limits of its key it waits until they have room, or the batch expires."""
_PRIORITY = b"-1000"
_ENDED = "frontends_ended"
_NO_ROOM = "what the batch, or the API key, may store leaves no room for the result"

_LEFT_OUT = {
    "output_too_large": f"the results have more than {MAX_RESULT_BYTES} bytes, or more than the API key may store; "
    "put the other requests into another batch",
    _ENDED: f"{MAX_ENDED_FRONTENDS} frontends ended while they carried out the batch",
}
"""Why a batch fails that keeps the results it has, by the code of the requests that are left out."""


class BatchRunner:
    """Carries out batches in one process; `run` looks for them."""

    def __init__(
        self,
        files: Files,
        batches: Batches,
        leases: Leases,
        operations: Mapping[str, Operation],
        settings: HttpSettings,
        account: FindAccount,
        metrics: FrontendMetrics,
        key_wait_s: float = WAIT_S,
    ) -> None:
        """`operations` are those of the endpoints that lines may name. `key_wait_s`: see `BatchKey`."""
        self._key_wait_s = key_wait_s
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
        """Owners of the batches that are carried out here, by the batches' ids."""
        self._attempts: dict[str, int] = {}
        """Earlier attempts at the segments that are carried out here, by the batches' ids."""
        self._last_start: dict[str, int] = {}
        """For each owner with waiting batches, which of all starts here was its last one."""
        self._starts = 0
        self._lines = LineSlots(LINES_AT_ONCE)
        self._reading = FairSlots(1)
        """For the batch whose file is read: keys with batches that wait for that have turns."""
        self._thread = Offload()
        """For files, which are longer than any other body: those do not wait for them."""
        self._token = secrets.token_hex(8)
        self._unleased: set[str] = set()
        """The batches that are carried out here though their leases are lost."""
        self._suspect = FairSlots(1)
        """For a line that is carried out alone, so that no such line of another batch is there when the process ends."""
        self._poke = asyncio.Event()

    def poke(self) -> None:
        """Look for batches now: there is a new one."""
        self._poke.set()

    async def run(self) -> None:
        """Carry out batches until cancelled; then others may go on with them at once."""
        try:
            self._leases.on_lost(self._lost)
            while True:
                self._poke.clear()
                await self._keep_unleased()
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
        queues: dict[str, deque[Waiting]] = {}
        for waiting in sorted(await self._batches.waiting(), key=lambda waiting: waiting.since):
            if waiting.id not in self._running:
                queues.setdefault(waiting.owner, deque()).append(waiting)
        self._last_start = {owner: self._last_start.get(owner, 0) for owner in queues}
        while queues and (count := self._others_wait_for()) < MAX_BATCHES:
            owner = min(queues, key=self._fair_share)
            own, _ = self._fair_share(owner)
            if own >= SHARED_BATCHES or (own and count >= SHARED_BATCHES):  # it has the fewest: the others have some, too
                return
            waiting = queues[owner].popleft()
            if not queues[owner]:
                del queues[owner]
            if await self._leases.take(waiting.id):
                self._last_start[owner] = self._starts = self._starts + 1
                self._owners[waiting.id] = owner
                self._lines.begin(waiting.id)
                self._running[waiting.id] = self._tasks.start(self._carry_out(waiting), f"batch {waiting.id}")

    def _others_wait_for(self) -> int:
        return len(self._running) - min(MAX_SLOW, sum(map(self._lines.is_slow, self._running)))

    def _fair_share(self, owner: str) -> tuple[int, int]:
        """Owners with the fewest batches here come first, and of these the one that has waited longest for its last start."""
        return sum(other == owner for other in self._owners.values()), self._last_start[owner]

    def _lost(self) -> None:
        self._unleased.update(self._running)
        self.poke()

    async def _keep_unleased(self) -> None:
        """Tell other frontends that batches go on here without their leases, and take these again if there are some to have."""
        for id in [*self._unleased]:
            await self._go_on(id, is_unleased=True)
        for id in [*self._unleased]:
            try:
                is_taken = await self._leases.take(id)
            except DynamoError as error:
                log.debug("the lease of batch %s could not be taken again: %s", id, error)
                return
            if is_taken and id in self._running:
                self._unleased.discard(id)
                await self._go_on(id, is_unleased=False)
            elif is_taken:
                await self._release(id)

    async def _go_on(self, id: str, *, is_unleased: bool) -> None:
        if (running := self._running.get(id)) is None:
            return
        try:
            await self._batches.go_on(self._owners[id], id, self._token, is_unleased=is_unleased)
        except (TakenOver, RecordNotFound):
            running.cancel()
        except DynamoError as error:
            log.debug("other frontends do not know that batch %s goes on here: %s", id, error)

    async def _carry_out(self, waiting: Waiting) -> None:
        owner, id = waiting.owner, waiting.id
        try:
            log.info("batch %s is carried out here", id)
            await self._carry_out_owned(waiting)
        except asyncio.CancelledError:  # in a task of its own, since the store does nothing for one that is cancelled
            stopping = awaited(self._try_to_stop(owner, id, self._attempts.get(id)))
            await asyncio.wait([stopping], timeout=STOP_S)
            stopping.cancel()
            raise
        finally:
            self._unleased.discard(id)
            self._attempts.pop(id, None)
            del self._running[id], self._owners[id]
            self._lines.end(id)
            await self._release(id)

    async def _carry_out_owned(self, waiting: Waiting) -> None:
        owner, id = waiting.owner, waiting.id
        try:
            owned = await self._batches.take_over(owner, id, self._token)
            batch, self._attempts[id] = owned.batch, owned.attempts
            if batch.status not in ENDED:
                with self._settings.capacity.holding() as occupied:
                    try:
                        batch = await self._worked_on(owned, occupied.hold)
                    except DamagedRecord as error:  # its input or results, which will not get better
                        batch = await self._failed(owner, batch, Problem(str(error), code="damaged_record"))
            self._metrics.batch_ended(batch.status)
            await self._batches.done(owner, id)
            self.poke()  # there is room for another one
        except RecordNotFound:
            if self._batches.now - waiting.since > CREATED_WITHIN_S:
                await self._batches.done(owner, id)
        except DynamoError as error:
            level = logging.DEBUG if isinstance(error, TakenOver) else logging.WARNING
            log.log(level, "batch %s stops for now: %s", id, error)
            while True:  # it keeps its lease until that is written
                if await self._try_to_stop(owner, id, None):
                    return
                await asyncio.sleep(POLL_S)

    async def _release(self, id: str) -> None:
        try:
            await self._leases.release(id)
        except DynamoError as error:
            log.debug("the lease of batch %s could not be given back: %s", id, error)

    async def _try_to_stop(self, owner: str, id: str, max_attempts: int | None) -> bool:
        """Say that nothing of a batch is carried out here any more; return whether that is written."""
        try:
            await self._batches.stop(owner, id, self._token, max_attempts)
        except Unavailable:
            return False
        except DynamoError as error:
            log.debug("batch %s is not there any more, or cannot be read: %s", id, error)
        return True

    async def _worked_on(self, owned: Owned, hold: Hold) -> Batch:
        """Return the batch at its end. `hold` counts what it has in memory. Raises Overloaded, Unavailable."""
        owner, batch, now = owned.owner, owned.batch, self._batches.now
        if owned.ended >= MAX_ENDED_FRONTENDS and (batch.status == "validating" or owned.ended > MAX_ENDED_FRONTENDS):
            # Its file ends them, or to put its results together.
            return await self._failed(owner, batch, Problem(_LEFT_OUT[_ENDED], code=_ENDED))
        try:
            key = BatchKey(self._account, owner, self._operations[batch.endpoint].declared.surface, self._key_wait_s)
            account = await key.account()
            async with self._reading.slot(account):
                lines = await self._lines_of(owner, batch, hold)
        except InvalidBatch as error:
            return await self._failed(owner, batch, *error.problems)
        except (RecordNotFound, Unauthenticated, Forbidden) as error:
            return await self._ended_early(owner, batch, Problem(str(error)), hold)

        def started(batch: Batch) -> Batch:
            batch = replace(batch, request_counts=replace(batch.request_counts, total=len(lines)))
            return replace(batch, status="in_progress", in_progress_at=now) if batch.status == "validating" else batch

        batch = await self._batches.change(owner, batch.id, started)
        done = await self._batches.segments(batch.id, hold)
        results_bytes = sum(segment.size_bytes for segment in done.values())
        if results_bytes != owned.results_bytes:  # what kept the last ones could not count them
            batch = await self._count(owner, batch, results_bytes, [segment.counts for segment in done.values()])
        left_out = "output_too_large" if is_full(done, MAX_RESULT_BYTES) else ""
        if owned.ended >= MAX_ENDED_FRONTENDS:
            left_out = _ENDED
        for number in range(-(-len(lines) // SEGMENT_LINES)):
            if batch.status != "in_progress" or self._batches.now >= batch.expires_at or left_out:
                break
            if number not in done:
                if not await self._batches.may_store(owner):
                    left_out = "output_too_large"
                    break
                own = Lines(number * SEGMENT_LINES, min(len(lines), (number + 1) * SEGMENT_LINES))
                at_once = None if owned.is_suspect(own) else own
                if await self._batches.attempt(owner, batch.id, self._token, at_once) > MAX_ATTEMPTS:
                    message = f"lines {own.first + 1} and following were carried out {MAX_ATTEMPTS} times without results"
                    return await self._ended_early(owner, batch, Problem(message, code="too_many_attempts"), hold)
                left = MAX_RESULT_BYTES - sum(segment.size_bytes for segment in done.values())
                async with AsyncExitStack() as counted:  # as stored, until the batch says so
                    room = ResultRoom(self._batches, owner, left, hold, counted)
                    done[number] = await self._segment(account, key, owned, number, lines, room)
                    results_bytes += done[number].size_bytes
                    batch = await self._count(owner, batch, results_bytes, [segment.counts for segment in done.values()])
                left_out = "output_too_large" if is_full(done, MAX_RESULT_BYTES) else ""
        if batch.status in ENDED:
            return batch
        return await self._finish(owner, batch, lines, done, hold, left_out)

    async def _lines_of(self, owner: str, batch: Batch, hold: Hold) -> list[BatchLine]:
        content = await self._files.content(owner, batch.input_file_id, hold)
        return await self._thread.run(parse_lines, content, batch.endpoint, self._settings.body_limits[Reads.JSON])

    async def _count(self, owner: str, batch: Batch, results_bytes: int, counts: Collection[RequestCounts]) -> Batch:
        completed, failed = sum(each.completed for each in counts), sum(each.failed for each in counts)

        def counted(batch: Batch) -> Batch:
            return replace(batch, request_counts=RequestCounts(batch.request_counts.total, completed, failed))

        batch = await self._batches.succeeded(owner, batch.id, self._token, results_bytes, counted)
        self._attempts[batch.id] = 0
        return batch

    async def _finish(
        self, owner: str, batch: Batch, lines: Sequence[BatchLine], done: Mapping[int, Segment], hold: Hold, left_out: str
    ) -> Batch:
        """Write the files of a batch, whether or not it has all its results; return it as it is then.

        `left_out` is the code of why the others are not carried out, or empty.
        """
        missing = [line for number, line in enumerate(lines) if number // SEGMENT_LINES not in done]
        code = "batch_cancelled" if batch.status == "cancelling" else left_out or "batch_expired"
        others = await self._of_missing(owner, batch, missing, code)
        results = await write_results(self._files, owner, batch, done, hold, others)
        now = self._batches.now

        def ended(batch: Batch) -> Batch:
            batch = replace(results.named_in(batch), finalizing_at=now)
            if not missing and all(segment.is_complete for segment in done.values()):
                return replace(batch, status="completed", completed_at=now)
            if batch.status == "cancelling":
                return replace(batch, status="cancelled", cancelled_at=now)
            if message := _LEFT_OUT.get(code):
                return replace(batch, status="failed", failed_at=now, errors=Problems([Problem(message, code=code)]))
            return replace(batch, status="expired", expired_at=now)

        return await self._batches.change(owner, batch.id, ended, filed_bytes=results.size_bytes)

    async def _of_missing(self, owner: str, batch: Batch, lines: Sequence[BatchLine], code: str) -> bytes:
        """Return what the error file has of lines that were not carried out: nothing if the key may not store so much more."""
        pieces: list[bytes] = []
        for begin in range(0, len(lines), _RESULTS_PER_STEP):
            pieces += [result_line(batch.id, line, None, code) for line in lines[begin : begin + _RESULTS_PER_STEP]]
            await asyncio.sleep(0)
        text = b"".join(pieces)
        try:
            async with self._batches.room(owner, len(text)):
                return text
        except PayloadTooLarge:
            return b""

    async def _ended_early(self, owner: str, batch: Batch, problem: Problem, hold: Hold) -> Batch:
        """End a batch that cannot go on, though it may have results, which its key was charged for: they are in its files."""
        done = await self._batches.segments(batch.id, hold)
        return await self._failed(owner, batch, problem, results=await write_results(self._files, owner, batch, done, hold))

    async def _failed(self, owner: str, batch: Batch, *problems: Problem, results: ResultFiles = NO_FILES) -> Batch:
        now = self._batches.now

        def failed(batch: Batch) -> Batch:
            return replace(results.named_in(batch), status="failed", failed_at=now, errors=Problems([*problems]))

        return await self._batches.change(owner, batch.id, failed, filed_bytes=results.size_bytes)

    async def _segment(
        self, account: Account, key: BatchKey, owned: Owned, number: int, lines: Sequence[BatchLine], room: ResultRoom
    ) -> Segment:
        """Carry out a segment, keep its results, and return them. Raises Unavailable if others have done so, and Overloaded."""
        batch, first = owned.batch, number * SEGMENT_LINES
        own = lines[first : first + SEGMENT_LINES]
        is_suspect = owned.is_suspect(Lines(first, first + len(own)))
        turns = AdmissionTurns(partial(self._is_wanted, account.name, batch.id), POLL_S)
        one_at_a_time = asyncio.Lock()

        def carried_out(index: int, line: BatchLine) -> Coroutine[Any, Any, LineOutcome]:
            position = Lines(index, index + 1)
            if owned.ends_frontends(position):
                return _not_again(batch, line)
            alone = partial(self._alone, account, owned, position, one_at_a_time) if is_suspect else nullcontext
            return self._line(account, key, batch, line, turns, room, alone)

        tasks = [awaited(carried_out(index, line)) for index, line in enumerate(own, first)]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        outputs = [outcome.text for outcome in outcomes if outcome.is_good]
        errors = [outcome.text for outcome in outcomes if not outcome.is_good]
        abandoned = sum(outcome.is_abandoned for outcome in outcomes)
        counts = RequestCounts(len(own), len(outputs), len(errors) - abandoned)
        segment = Segment(await joined(outputs), await joined(errors), counts)
        await outlasting(self._keep(owned, number, segment, outcomes), STOP_S)
        return segment

    async def _keep(self, owned: Owned, number: int, segment: Segment, outcomes: Sequence[LineOutcome]) -> None:
        """Keep results, and charge what they used."""
        if not await self._batches.put_segment(owned.owner, owned.batch.id, self._token, number, segment):
            raise TakenOver
        for outcome in outcomes:
            if outcome.account is not None:
                outcome.account.settle()
        self._metrics.batch_lines(completed=segment.counts.completed, failed=segment.counts.failed)

    async def _is_wanted(self, owner: str, id: str) -> bool:
        try:
            return (await self._batches.read(owner, id)).status == "in_progress"
        except Unavailable:
            return True
        except RecordNotFound:
            return False

    @asynccontextmanager
    async def _alone(self, account: Account, owned: Owned, position: Lines, one_at_a_time: asyncio.Lock) -> AsyncIterator[None]:
        """Carry out one line while no other one of those is at which a frontend may have ended.

        What has not ended the process for `ALONE_S` goes on beside lines of other batches, which may not wait for hours.
        """
        async with one_at_a_time:
            let_others = await self._suspect.take(account)
            timer = asyncio.get_running_loop().call_later(ALONE_S, let_others)
            try:
                await self._batches.begin(owned.owner, owned.batch.id, self._token, position)
                yield
                await self._batches.begin(owned.owner, owned.batch.id, self._token, None)
            finally:
                timer.cancel()
                let_others()

    async def _line(
        self,
        account: Account,
        key: BatchKey,
        batch: Batch,
        line: BatchLine,
        turns: AdmissionTurns,
        room: ResultRoom,
        alone: Callable[[], AbstractAsyncContextManager[None]],
    ) -> LineOutcome:
        """Carry out a line, each time within `alone`."""
        operation = self._operations[batch.endpoint]
        pause_s, retries = FIRST_PAUSE_S, 0
        while True:
            async with turns.turn() as end_turn, alone(), self._lines.slot(account, batch.id):
                if not turns.is_wanted:
                    return LineOutcome(result_line(batch.id, line, None, "batch_cancelled"), is_good=False, is_abandoned=True)
                if not await room.is_left():
                    return LineOutcome(result_line(batch.id, line, None, "output_too_large"), is_good=False, is_abandoned=True)
                newest, wait_s = key.find()
                if wait_s:
                    turns.refused(wait_s)
                    continue
                line_account = LineAccount(newest or account, end_turn)
                timeout_s = max(1, batch.expires_at - self._batches.now)
                request_id = line_id(batch.id, line)
                exchange, response = await self._call(line_account, operation, bytes(line.body), request_id, timeout_s)
                if limited_s := exchange.limited_s or key.wait_after(exchange.status):
                    turns.refused(limited_s)
                else:
                    turns.ended()
            status = exchange.status or 500
            is_refused = bool(limited_s) or status in _REFUSED
            if not is_refused or self._batches.now + (limited_s or pause_s) >= batch.expires_at:
                break
            if not limited_s:
                retries += 1
                if retries == _RETRIES:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        if not await room.take(len(response), len(result_line(batch.id, line, (status, b""))) + len(response)):
            text = result_line(batch.id, line, None, "output_too_large", _NO_ROOM)
            return LineOutcome(text, is_good=False, account=line_account)
        result = result_line(batch.id, line, (status, response))
        return LineOutcome(result, is_good=status < 400, account=line_account)

    async def _call(
        self, account: Account, operation: Operation, body: bytes, request_id: str, timeout_s: int
    ) -> tuple[Exchange, bytes]:
        """Return the exchange, and the body of the response, of a request that no client sent.

        It is one of the operation like any other, within all that this declares; its deadline is that of the batch.
        """
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id.encode()),
            (b"x-dynamo-request-priority", _PRIORITY),
            (TIMEOUT.encode(), b"%d" % (timeout_s * 1000)),
        ]
        request = LineRequest(operation.path, headers, body)
        exchange = Exchange(request, self._settings)
        exchange.route(operation.declared, operation.errors, operation.endpoint)
        exchange.admit(account)

        async def handle(exchange: Exchange) -> None:
            self._account(account.name, operation.declared.surface)  # the key file may have changed since the batch was begun
            await operation.handle(exchange)

        try:
            occupied = exchange.occupy()
        except Overloaded as error:
            await exchange.fail(error)
            return exchange, await joined(request.response)
        try:
            await exchange.run(handle)
        finally:
            occupied.leave()
        return exchange, await joined(request.response)


async def _not_again(batch: Batch, line: BatchLine) -> LineOutcome:
    """Return the outcome of a line at which too many frontends ended."""
    why = f"{MAX_ENDED} frontends ended while they carried out this request"
    return LineOutcome(result_line(batch.id, line, None, _ENDED, why), is_good=False)
