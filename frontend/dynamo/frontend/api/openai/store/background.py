"""Responses that are generated in the background: beside the request that starts them, until they are stored.

| until | status |
|---|---|
| the account admits the request, its prompt is ready, and the line has room; a failure is the request's | none: not stored |
| it is sent to an instance | `queued` |
| it has ended | `in_progress` |
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dynamo.common.errors import Code, DynamoError, Overloaded, RateLimited, Unavailable
from dynamo.common.process.background import Tasks, awaited
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.api.declaration import TEXT, within
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.items import Item
from dynamo.frontend.api.openai.store.stored import BEAT_S, StoredResponses
from dynamo.frontend.api.statuses import log_failure, public_message

log = logging.getLogger(__name__)

_DEADLINE_S = 86_400.0
IN_BACKGROUND = replace(TEXT, deadline_s=_DEADLINE_S)
"""A response in the background is admitted and charged as any other; it is a request of its own, with all that its request held,
until it is stored."""
MAX_RUNNING = 256
"""In a process. A key has half at most of what others leave."""
_RETRY_AFTER_S = 1.0
_ATTEMPTS = 6
"""To write a response of which the store is there, and refuses it."""
_LONGEST_PAUSE_S = 30.0
"""Between two attempts to write a response, while JetStream is away. Its return ends the pause."""

FAILURES = {Code.INVALID_REQUEST: "invalid_prompt", Code.OVERLOADED: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses; others are `server_error`."""


class Stages:
    """How far a response in the background is."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.is_admitted: asyncio.Future[None] = loop.create_future()
        self.is_sent: asyncio.Future[None] = loop.create_future()
        self._is_stored = asyncio.Event()

    async def admitted(self) -> None:
        """Nothing refuses the request any more. Return when the response is stored."""
        if not self.is_admitted.done():
            self.is_admitted.set_result(None)
        await self._is_stored.wait()

    def stored(self) -> None:
        """The response is stored as `queued`."""
        self._is_stored.set()

    def sent(self) -> None:
        """The request was sent to an instance."""
        if not self.is_sent.done():
            self.is_sent.set_result(None)


Generate = Callable[[Stages], Awaitable[ResponseObject]]


class BackgroundResponses:
    """Background responses of one process. `drain` ends them."""

    def __init__(self, stored: StoredResponses, *, beat_s: float = BEAT_S) -> None:
        self.stored = stored
        self._beat_s = beat_s
        self._clock = asyncio.get_running_loop().time
        self._tasks = Tasks()
        self._running: Counter[str] = Counter()
        """How many responses begin or run at present, by owner."""

    async def start(
        self, owner: str, response: ResponseObject, items: Sequence[Item], generate: Generate, occupied: Occupancy
    ) -> ResponseObject:
        """Store `response` as one that is queued once `generate` is admitted, and let `generate` replace it.

        `occupied` is left when that has ended, or if this raises.

        Raises Overloaded, RateLimited, Unavailable, and what keeps `generate` from being admitted.
        """
        try:
            self._check_room(owner)
        except DynamoError:
            occupied.leave()
            raise
        self._running[owner] += 1
        stages = Stages()
        work = awaited(_outcome(response, stages, generate))
        try:
            admitted: set[asyncio.Future[Any]] = {work, stages.is_admitted}
            await asyncio.wait(admitted, return_when=asyncio.FIRST_COMPLETED)
            if not stages.is_admitted.done():
                return work.result()  # raises why it is not
            revision = await self.stored.save(owner, response, items, last=0)
        except BaseException:
            work.cancel()
            await asyncio.wait({work})
            self._left(owner, occupied)
            raise
        assert revision is not None, "the id is new"
        stages.stored()
        running = self._tasks.start(self._run(owner, response, revision, stages, work), f"response {response.id}")
        running.add_done_callback(lambda _: self._left(owner, occupied))
        return response

    def _check_room(self, owner: str) -> None:
        """Raise Overloaded if no more may run, and RateLimited if a key has half of what others leave."""
        left, own = MAX_RUNNING - self._running.total(), self._running[owner]
        if left <= 0:
            raise Overloaded(f"{MAX_RUNNING} responses are being generated in the background already")
        if owner and own >= left:
            message = f"{own} responses of the API key '{owner}' are being generated in the background; the rest is for others"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)

    def _left(self, owner: str, occupied: Occupancy) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        occupied.leave()

    async def drain(self, timeout_s: float) -> None:
        """Let those that run end within the timeout, and cancel the others."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._tasks.finish()
        except TimeoutError:
            log.warning("%d responses in the background were not complete in time", len(self._tasks))
        await self._tasks.close()
        await self.stored.close()

    async def _run(
        self, owner: str, response: ResponseObject, revision: int, stages: Stages, work: asyncio.Task[ResponseObject]
    ) -> None:
        written: int | None = revision
        deadline = self._clock() + _DEADLINE_S
        awaited_next: set[asyncio.Future[Any]] = {work, stages.is_sent}
        try:
            with self.stored.generating(response.id):
                while written is not None:
                    await asyncio.wait(awaited_next, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        written = await self._write(owner, work.result(), written, deadline)
                        break
                    is_new = stages.is_sent in awaited_next and stages.is_sent.done()
                    if is_new:
                        awaited_next.discard(stages.is_sent)
                        response = msgspec.structs.replace(response, status="in_progress")
                    written = await self._write(owner, response, written, deadline, is_new=is_new)
        finally:
            work.cancel()
            await asyncio.wait({work})  # it tells the worker
        if written is None:
            log.info("response %s was cancelled or deleted, or could not be stored", response.id)
            await self.stored.discard_events_of_deleted(owner, response.id)

    async def _write(
        self, owner: str, response: ResponseObject, revision: int, deadline: float, *, is_new: bool = True
    ) -> int | None:
        """Write a response unless it has been ended meanwhile; return its revision, or None if it has.

        If it is not `is_new`, what is there is as it is to be, and only renewed. While JetStream is away, this waits until the
        deadline.
        """
        pause_s = self._beat_s
        is_failing = False
        attempts = 0
        while attempts < _ATTEMPTS:
            try:
                if is_new:
                    written = await self.stored.save(owner, response, None, last=revision)
                else:
                    written = await self.stored.renew(response.id, revision)
                if written is not None:
                    return written
                # Perhaps this process wrote it, and did not get to know.
                current = await self.stored.running_revision(owner, response.id)
                if current is None:
                    return None
                revision = current
                attempts += 1
            except Unavailable as error:
                if not is_failing:
                    log.warning("response %s cannot be stored yet: %s", response.id, error)
                is_failing = True
                if self._clock() >= deadline:
                    break
                await self.stored.ready_again(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except DynamoError as error:
                response, is_new = failed(msgspec.structs.replace(response, output=()), error), True
                attempts += 1
        log.error("response %s is lost: it could not be stored", response.id)
        return None


async def _outcome(response: ResponseObject, stages: Stages, generate: Generate) -> ResponseObject:
    """Return the response at its end. Raises what keeps it from being admitted."""
    try:
        async with within(IN_BACKGROUND.deadline_s):
            return await generate(stages)
    except Exception as error:
        if not stages.is_admitted.done():
            raise
        log_failure(error, response.id, "a response in the background")
        return failed(response, error)


def failed(response: ResponseObject, error: BaseException) -> ResponseObject:
    """Return the response as one that failed."""
    code = error.code if isinstance(error, DynamoError) else Code.INTERNAL
    described = {"code": FAILURES.get(code, "server_error"), "message": public_message(error)}
    return msgspec.structs.replace(response, status="failed", error=described)
