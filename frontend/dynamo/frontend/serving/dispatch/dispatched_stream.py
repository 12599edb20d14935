"""One request at an instance, and at another one where that is safe; `retry.py` says where it is."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InvalidRequest,
    ModelStarting,
    NoInstances,
    Overloaded,
    Unavailable,
    release,
)
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.base import RoutingDecision, TooLate
from dynamo.frontend.router.cache.hashing import LONG_PROMPT_BYTES
from dynamo.frontend.router.loads.busy import all_busy
from dynamo.frontend.serving.call import Call, Stream, Work
from dynamo.frontend.serving.dispatch.booking import Booking
from dynamo.frontend.serving.dispatch.parts import DispatchParts
from dynamo.frontend.serving.dispatch.retry import (
    LINK_REASON,
    Attempt,
    Attempts,
    RetryBudget,
    Verdict,
    cost_no_work,
    died_holding,
    reason_of,
    was_lost_on_the_way,
)
from dynamo.frontend.serving.queue.admission import AdmissionQueue, QueuePosition
from dynamo.frontend.serving.queue.starting import LEAVING_S


class DispatchedStream:
    """One request, at whichever instance it is. Leaving it ends the request there and releases the booking."""

    __slots__ = (
        "_attempts",
        "_booking",
        "_budget",
        "_call",
        "_deadline",
        "_ended",
        "_failure",
        "_shared",
        "_tried_at",
        "_work",
        "decision",
        "started",
        "trailer",
    )

    def __init__(self, shared: DispatchParts, work: Work, call: Call, deadline: float | None, attempts: Attempts) -> None:
        self._shared = shared
        self._work = work
        self._call = call
        self._deadline = deadline
        self._attempts = attempts
        self._booking: Booking | None = None
        """None before the first `read`, between two attempts, and at the end."""
        self._tried_at: float | None = None
        """When an instance was first looked for; None if one was there at once."""
        self._ended = False
        self._failure: DynamoError | None = None
        self.decision: RoutingDecision | None = None
        """Where the request is, or was last; None before the first `read`."""
        self.started = False
        """Whether the instance in `decision` has responded with anything yet."""
        self.trailer: Buffer = b""
        """The last frame of the instance, after `read` returned []."""
        self._budget: RetryBudget | None = None if call.is_copy else shared.budgets.request(work.model, call.account.name)
        """For retries; None: there are none."""

    def __repr__(self) -> str:
        state = "ended" if self._ended else repr(self._failure) if self._failure is not None else repr(self._booking)
        failed = [f"{instance:x}" for instance in self._attempts.failed]
        return f"<DispatchedStream {self._call.request_id} of model {self._work.model!r}, failed at {failed}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request at its instance if it has not ended."""
        if self._ended:
            return
        self._failure = self._failure or Cancelled()
        booking, self._booking = self._booking, None
        if booking is not None:
            booking.cancel(self._failure)

    def at_once(self) -> Stream | None:
        """Return the stream at the instance, where the same can be read as here until it ends or fails. Raises DynamoError.

        It is opened if nothing has to be waited for; None: `read` says what there is to do. A caller that reads there calls
        `responded` after the first part of the response.
        """
        booking = self._booking or self._book_at_once()
        return None if booking is None else booking.stream

    def responded(self) -> None:
        """The first part of the response has arrived."""
        assert self._booking is not None
        self.started = True
        self._shared.booker.router.first_token(self._booking.id)

    def found_cached(self, tokens: int) -> None:
        """The instance in `decision` found so many tokens of the prompt cached."""
        decision = self.decision
        if decision is not None and decision.fetch is not None and not self._work.is_prefilled:
            self._shared.booker.router.found_cached(self._work, decision, tokens)

    async def read(self) -> list[Buffer]:
        """Return all frames that have arrived, at least one; [] at the end. Raises DynamoError; see `move` for what then."""
        if self._ended:
            return []
        while True:
            booking = self._booking or self._book_at_once() or await self._book()
            try:
                bodies = await booking.stream.read()
                break
            except DynamoError as error:
                booking.release(error)
                await self._after_failure(booking, error)
        if not bodies:
            self.trailer = booking.stream.trailer
            self._ended = True
            if self._work.fingerprint:
                self._shared.suspects.responded(self._work.fingerprint)
            booking.release(None)
        elif not self.started:
            self.responded()
        return bodies

    def check_line(self) -> None:
        """Raise Overloaded or ModelStarting if the request, which has not been read, would have to wait now and has no place.

        A queue may be full a moment later nevertheless.
        """
        shared, work, call = self._shared, self._work, self._call
        queue = shared.queue
        try:
            if queue is not None and queue.must_wait(work.model, work.role, call.account, work.priority):
                self._position(queue)
            elif not shared.candidates.select(work) and (pool := shared.starting(work, call)) is not None:
                shared.starts.check_room(pool, call.account.name)
        except (Overloaded, ModelStarting) as error:
            self._count_refusal(error)
            raise

    async def result(self) -> Buffer:
        """Return the one response of a request that has just one; however this ends, so does the stream. Raises DynamoError."""
        while True:
            booking = self._booking or self._book_at_once() or await self._book()
            try:
                body = await booking.stream.result()
                break
            except DynamoError as error:
                booking.cancel(error)
                await self._after_failure(booking, error)
            except BaseException:
                booking.cancel(Cancelled())
                raise
        booking.release(None)
        self._ended = True
        if self._work.fingerprint:
            self._shared.suspects.responded(self._work.fingerprint)
        return body

    async def move(self, error: DynamoError, work: Work) -> None:
        """After `read` raised `error` in the middle: let another instance do `work`, the rest of it.

        Raises `error` if that may not be, by the rules for retries.
        """
        self.started = False
        self._attempts.number = 0
        await self._recover(error, is_delivered=False)
        self._failure = None
        self._work = work

    def split(self, error: DynamoError, work: Work) -> DispatchedStream:
        """After `move`, with the same `error`: one more stream, for another part of the rest, under the same conditions.

        Raises `error` if the retry budget does not allow it.
        """
        shared, attempts = self._shared, self._attempts
        # Nothing has failed if it was our own connection that was away.
        if attempts.failed and not (self._budget is not None and self._budget.take(shared.clock())):
            raise error
        return DispatchedStream(shared, work, self._call, self._deadline, attempts.copy())

    async def instance_started(self) -> None:
        """Return when there is an instance for the request, or none is to start. Raises ModelStarting, DeadlineExceeded."""
        shared = self._shared
        try:
            while not shared.candidates.select(self._work) and (pool := shared.starting(self._work, self._call)) is not None:
                await self._wait_for_start(pool, shared.clock())
        except (DynamoError, asyncio.CancelledError) as error:
            self._count_refusal(error)
            raise

    def count_missing(self) -> None:
        """Count the request as refused if an instance for it is to start, and it is done without one."""
        shared = self._shared
        if not shared.candidates.select(self._work) and shared.starting(self._work, self._call) is not None:
            shared.demand.refuse(self._work, *self._demand(), ())

    def redirect(self, work: Work) -> None:
        """Before the first `read`, or after `move`: request `work` instead."""
        self._work = work

    # After a failure

    async def _after_failure(self, booking: Booking, error: DynamoError) -> None:
        """After `error` at an instance: return when another one may be sent the request, or raise the error for the caller."""
        shared = self._shared
        self._booking = None
        now, instance = shared.clock(), booking.decision.instance.id
        if booking.is_probe and isinstance(error, EngineError):
            error.retryable = True  # it was sent there to try the instance
        has_died = died_holding(error) and not shared.link.is_silent
        self._attempts.deaths += has_died
        if not shared.may_come_back(error, now):
            shared.candidates.failed(instance, error)
            if has_died:
                shared.suspects.died(self._work.fingerprint, instance, now)
        try:
            await self._recover(error, is_delivered=self.started or booking.stream.started)
        except DynamoError as last:
            self._failure = last
            raise
        release(error)  # the failed stream keeps it, and the frames of its traceback keep the response that is to come
        self._work.metrics.retries.inc()

    async def _recover(self, error: DynamoError, *, is_delivered: bool) -> None:
        """Return when the request may be sent again after `error`; raise the error for the caller if it may not."""
        assert self.decision is not None
        shared, attempts = self._shared, self._attempts
        now = shared.clock()
        work = self._work if self._work.otherwise is None else self._work.otherwise
        failed = self._failed_by(error, self.decision.instance.id, work)
        attempt = Attempt(
            number=attempts.number + 1,
            deaths=attempts.deaths,
            is_delivered=is_delivered,
            is_pinned=work.pinned is not None,
            has_alternative=bool(shared.candidates.select(work, failed)) or self._may_start_another(error, work),
            is_disturbed=shared.may_come_back(error, now),
            deadline=self._deadline,
            gives_up_at=attempts.gives_up_at,
        )
        if await self._wait_or_raise(error, attempt, now):
            # It may be back by then, but another one may be sooner, and this one may be dead.
            attempts.failed = failed if attempt.has_alternative else []
            work.metrics.recovered(LINK_REASON)
            return
        if self._budget is None or not (cost_no_work(error) or self._budget.take(now)):
            raise error
        work.metrics.recovered(reason_of(error))
        attempts.number += 1
        attempts.failed = failed
        self._work = work

    def _may_start_another(self, error: DynamoError, work: Work) -> bool:
        """Return whether another instance is to start in the place of the last one, which has left or may be leaving."""
        if not isinstance(error, Unavailable) or self._shared.starting(work, self._call) is None:
            return False
        return not (self._attempts.has_waited_for_end and self._shared.candidates.select(work))

    def _failed_by(self, error: DynamoError, instance: InstanceId, work: Work) -> list[InstanceId]:
        """Return the instances that are not to be sent the request, now that `instance` has failed it."""
        attempts = self._attempts
        failed = [*attempts.failed, instance]
        if was_lost_on_the_way(error):
            attempts.lost.append(instance)
        if attempts.lost and not self._shared.candidates.select(work, failed):
            return [id_ for id_ in failed if id_ not in attempts.lost]
        return failed

    async def _wait_or_raise(self, error: DynamoError, attempt: Attempt, now: float) -> bool:
        """Do what the policy decides. Return whether that was to wait; False: another instance is to be sent the request."""
        match self._shared.policy.decide(error, attempt, now):
            case Verdict.RAISE:
                raise error
            case Verdict.BLAME:
                raise EngineError(
                    f"{attempt.deaths} instances died while they held this request, so it is not sent to another one"
                ) from error
            case Verdict.EXPIRE:
                raise DeadlineExceeded() from error
            case Verdict.WAIT:
                await self._wait(now)
                return True
            case Verdict.RETRY:
                return False

    async def _wait(self, now: float) -> None:
        """Let time pass while the connection comes back."""
        shared, attempts = self._shared, self._attempts
        until = self._deadline
        if until is None:
            until = attempts.gives_up_at = attempts.gives_up_at or now + shared.policy.longest_wait_s
        if not shared.link.is_connected:
            with contextlib.suppress(TimeoutError):  # the next decision says which bound was reached
                async with asyncio.timeout_at(until):
                    await shared.link.connected()
        # All requests wait for the same workers: some earlier, some later, lest all be sent at once.
        pause_s = shared.policy.pause_s(attempts.waits, random.random())
        attempts.waits += 1
        await asyncio.sleep(min(pause_s, max(until - shared.clock(), 0.0)))

    # To an instance

    def _book_at_once(self) -> Booking | None:
        """Book the request if nothing has to be waited for, as for most requests; None: `_book` says what there is to do."""
        shared, work = self._shared, self._work
        if self._failure is not None or shared.queue is not None or len(work.prompt) >= LONG_PROMPT_BYTES:
            return None
        if self._deadline is not None and shared.clock() >= self._deadline:
            return None
        candidates = shared.candidates.select(work, self._attempts.failed)
        if not candidates or not shared.link.is_connected:
            return None
        try:
            return self._book_one_of(candidates)
        except DynamoError as error:
            self._failure = error
            self._count_refusal(error)
            raise

    async def _book(self) -> Booking:
        """Book the request on an instance that can do the work. Raises DynamoError, the same again if it did so before."""
        if self._failure is not None:
            raise self._failure
        try:
            return await self._booked()
        except DynamoError as error:
            self._failure = error
            self._count_refusal(error)
            raise
        except asyncio.CancelledError as error:  # its client has waited for long enough
            self._count_refusal(error)
            raise

    async def _booked(self) -> Booking:
        shared, call = self._shared, self._call
        if self._tried_at is None:
            self._tried_at = shared.clock()
        while True:
            now = shared.clock()
            if self._deadline is not None and now >= self._deadline:
                raise DeadlineExceeded()
            error: Unavailable
            if not shared.link.is_connected:
                error = Unavailable("the frontend has no connection to its workers now")
            elif candidates := shared.candidates.select(self._work, self._attempts.failed):
                work, queue = self._work, shared.queue
                if len(work.prompt) >= LONG_PROMPT_BYTES and await shared.booker.hash_prompt(work, candidates):
                    continue  # meanwhile, others had their turns
                if queue is None:
                    return self._book_one_of(candidates)
                must_wait = queue.must_wait(work.model, work.role, call.account, work.priority)
                if not must_wait and (booking := self._book_unless_busy(candidates)) is not None:
                    queue.sent_at_once(work.model, work.role, call.account, _cost(work))
                    return booking
                if work.carried is not None and work.priority < 0:
                    raise all_busy(work.model)  # to gateways, a negative priority says that a request is shed rather than queued
                if (in_turn := await self._booked_in_turn(queue)) is not None:
                    return in_turn
                continue
            elif self._work.otherwise is not None:
                self._work = self._work.otherwise
                continue
            elif (pool := shared.starting(self._work, call)) is not None:
                await self._wait_for_start(pool, now)
                continue
            else:
                error = self._no_instance()
            attempt = Attempt(
                was_sent=False,
                has_alternative=False,
                is_disturbed=shared.is_disturbed(now),
                deadline=self._deadline,
                gives_up_at=self._attempts.gives_up_at,
            )
            await self._wait_or_raise(error, attempt, now)
            self._attempts.failed.clear()  # what failed before may be back, too

    async def _wait_for_start(self, pool: Pool, now: float) -> None:
        """Return when the request may try again at any instance. Raises ModelStarting, DeadlineExceeded."""
        starts, attempts, work = self._shared.starts, self._attempts, self._work
        if attempts.starts_by is None:
            attempts.starts_by = now + starts.timeout_s
        tokens, owner = len(work.prompt) // TOKEN_BYTES, self._call.account.name
        if self._shared.candidates.select(work):  # it has failed the request and is registered still
            attempts.has_waited_for_end = True
            await starts.wait_for_end(pool, owner, tokens, min(attempts.starts_by, now + LEAVING_S), self._deadline)
        else:
            with self._call.waiting(owner):
                await starts.wait(pool, owner, tokens, attempts.starts_by, self._deadline)
        attempts.failed.clear()  # the instances have changed

    async def _booked_in_turn(self, queue: AdmissionQueue) -> Booking | None:
        """Book when some instance may take more and it is this request's turn. None: there is no candidate or no link any more.

        Raises Overloaded if too many requests wait already, or for too long, TooLate if this one has waited too long for its
        goals, and DeadlineExceeded.
        """
        shared, work = self._shared, self._work
        if queue.looks_at_caches:
            await shared.booker.hash_prompt(work, shared.candidates.select(work, self._attempts.failed))
        with self._call.waiting(self._call.account.name), self._position(queue) as position:
            while True:
                await position.turn()
                candidates = shared.candidates.select(work, self._attempts.failed)
                if not candidates or not shared.link.is_connected:
                    return None
                if (booking := self._book_unless_busy(candidates)) is not None:
                    return booking

    def _position(self, queue: AdmissionQueue) -> QueuePosition:
        work, call = self._work, self._call
        return queue.position(
            work.model,
            work.role,
            account=call.account,
            priority=work.priority,
            tokens=_cost(work),
            deadline=self._deadline,
            missing_tokens=self._missing_tokens_with_room,
            demand=self._demand,
            instance=work.pinned,
        )

    def _missing_tokens_with_room(self) -> int | None:
        """Return how many tokens of the prompt an instance would have to compute; None: unknown, or all instances are busy."""
        candidates = self._shared.candidates.select(self._work, self._attempts.failed)
        return self._shared.booker.missing_tokens_with_room(self._work, candidates) if candidates else None

    def _demand(self) -> tuple[Role, int]:
        """Return the role of the instances that the request is for, and the tokens of its prompt that none of them has cached."""
        work = self._work
        candidates = self._shared.candidates.select(work)
        pool = None if candidates else self._shared.starts.pool(work.name or work.model, work.model, work.role)
        role = candidates[0].card.role if candidates else work.role or (Role.AGGREGATED if pool is None else pool.role)
        missing_tokens = len(work.prompt) // TOKEN_BYTES
        if candidates and (work.hashes is not None or len(work.prompt) < LONG_PROMPT_BYTES):
            cached = self._shared.booker.router.missing_tokens(work, candidates)
            missing_tokens = missing_tokens if cached is None else cached
        return role, missing_tokens

    def _count_refusal(self, error: BaseException) -> None:
        """Count a request that gets no instance, unless that is the client's mistake."""
        work, candidates = self._work, self._shared.candidates.select(self._work)
        is_misdirected = work.pinned is not None and not candidates
        if self.decision is None and not work.is_counted and not is_misdirected and not isinstance(error, InvalidRequest):
            self._shared.demand.refuse(work, *self._demand(), candidates)

    def _book_unless_busy(self, candidates: Sequence[Instance]) -> Booking | None:
        """Book the request; None: it may queue. Raises TooLate if that would not help."""
        try:
            return self._book_one_of(candidates)
        except TooLate:
            raise
        except Overloaded:
            return None

    def _book_one_of(self, candidates: Sequence[Instance]) -> Booking:
        shared, work, failed = self._shared, self._work, self._attempts.number
        work.was_admitted = failed > 0
        if self.decision is not None:
            work.is_counted = True
        work.waited_s = 0.0 if self._tried_at is None else shared.clock() - self._tried_at
        self._booking = booking = shared.booker.book(
            work, self._call, candidates, deadline=self._deadline, failed_attempts=failed
        )
        self.decision = booking.decision
        self._call.progress.was_sent()
        return booking

    def _no_instance(self) -> Unavailable:
        work = self._work
        if work.pinned is None:
            return NoInstances(work.model)
        return Unavailable(f"instance {work.pinned:x} does not serve model '{work.model}' now")


def _cost(work: Work) -> int:
    """Return the tokens of the prompt and of the expected responses."""
    return len(work.prompt) // TOKEN_BYTES + work.sequences * work.expected_output_tokens
