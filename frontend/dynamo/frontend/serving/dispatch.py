"""Sends a request to an instance, and to another one where that is safe.

Picking an instance and booking the request on it is one synchronous step; the booking is released on every exit path. A failed
attempt is repeated

1. only if the error says that it may be (`retryable`), and only before the first frame was delivered;
2. only on another instance, and never if the caller named the instance;
3. only inside the deadline, `max_attempts` and the retry budget.

After our own NATS connection was away this is different for `reconnect_grace_s`: the instances have lost theirs too, so one that
seems gone probably comes back. Then requests wait, and may ask the same instance again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import secrets
import time
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    InstanceGone,
    NoInstances,
    Overloaded,
    Unavailable,
)
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.messaging.frames import Body, Buffer
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.tracing import Span
from dynamo.frontend.config import RetryOptions, ServingOptions
from dynamo.frontend.router.base import Router, RouteRequest, RoutingDecision
from dynamo.frontend.router.hashing import LONG_PROMPT_BYTES
from dynamo.frontend.serving.admission import AdmissionQueue
from dynamo.frontend.serving.call import Call, Client, Instances, Link, Stream, Work
from dynamo.frontend.serving.prefix_reuse import PrefixReuse

REQUEST_ID_HEADER = "request-id"
"""Where `messaging.server` looks for the request id."""

BOOKING_HEADER = "booking"
"""Names the booking to the worker, which names it in its load reports."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5


def able_to_serve(
    instances: Sequence[Instance], version: str = "", tokenizer: str = "", role: Role | None = None
) -> tuple[Instance, ...]:
    """The instances that a request can be sent to: of this role, or all that answer requests."""
    return tuple(
        instance
        for instance in instances
        if (not version or version in instance.card.versions)
        and (not tokenizer or (instance.card.llm is not None and instance.card.llm.tokenizer == tokenizer))
        and (instance.card.role is role if role is not None else instance.card.role is not Role.PREFILL)
    )


class RetryBudget:
    """A token bucket that grows with requests and with time, so that retries stay a fraction of the traffic."""

    def __init__(self, settings: RetryOptions, now: float) -> None:
        self._ratio = settings.ratio
        self._per_s = settings.floor_per_s
        self._burst = float(settings.burst)
        self._left = self._burst
        self._at = now

    def request(self) -> None:
        """A request came in."""
        self._left = min(self._burst, self._left + self._ratio)

    def take(self, now: float) -> bool:
        """Whether one retry may be made now; it is counted."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Dispatcher:
    """Opens requests at instances. Made once per process, inside its event loop."""

    def __init__(
        self,
        directory: Instances,
        client: Client,
        link: Link,
        router: Router,
        settings: ServingOptions | None = None,
        queue: AdmissionQueue | None = None,
    ) -> None:
        self._queue = queue
        self._directory = directory
        self._client = client
        self._link = link
        self._router = router
        settings = settings or ServingOptions()
        self._timeout_s = settings.request_timeout_s
        self._retry = settings.retry
        self._loop = asyncio.get_running_loop()
        self._budget = RetryBudget(self._retry, self._loop.time())
        self.reuse = PrefixReuse(self._loop.time)
        """What prompts found in the caches of instances."""
        # Clients choose request ids and may use one twice; bookings have ids of their own, unique among frontends too.
        self._origin = secrets.token_hex(6)
        self._bookings = itertools.count()
        self._able: dict[tuple[str, str, str, Role | None], tuple[Sequence[Instance], tuple[Instance, ...]]] = {}
        self._refusing: dict[InstanceId, float] = {}

    def call(self, work: Work, call: Call) -> Awaitable[Buffer]:
        """The one answer to a request. Raises DynamoError."""
        return DispatchedStream(self, work, call).result()

    def stream(self, work: Work, call: Call) -> DispatchedStream:
        """A request with any number of answers. An instance is picked at the first `read`."""
        return DispatchedStream(self, work, call)

    async def ask(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        """What one instance answers to a question about itself: not routed, not booked, not repeated. Raises DynamoError."""
        return await self.ask_at(instance.id, instance.subject, verb, body, deadline)

    async def ask_at(self, instance: InstanceId, subject: str, verb: str, body: Body, deadline: float) -> Buffer:
        """The same of an instance that need not serve a model."""
        stream = self._client.open(instance, subject, verb, body, deadline=deadline)
        try:
            return await stream.result()
        finally:
            stream.cancel()

    def deadline(self, call: Call) -> float | None:
        """The call's deadline, or else the default one, counted from now."""
        if call.deadline is not None or self._timeout_s is None:
            return call.deadline
        return self._loop.time() + self._timeout_s

    def leave_out(self, instance: InstanceId) -> None:
        """The instance gets no requests, unless there is no other, until `take_back`."""
        self._refusing[instance] = math.inf

    def take_back(self, instance: InstanceId) -> None:
        """Ends `leave_out`."""
        self._refusing.pop(instance, None)

    def removed(self, instance: InstanceId) -> None:
        """An instance deregistered."""
        self._refusing.pop(instance, None)
        self.reuse.forget(instance)
        self._router.removed(instance)

    def able_to_serve(self, name: str, version: str = "", tokenizer: str = "", role: Role | None = None) -> tuple[Instance, ...]:
        """`able_to_serve` of the instances of a model, alias or adapter; the same tuple until they change."""
        instances = self._directory.instances(name)
        key = (name, version, tokenizer, role)
        known = self._able.get(key)
        if known is not None and known[0] is instances:
            return known[1]
        able = able_to_serve(instances, version, tokenizer, role)
        if isinstance(instances, tuple) and instances:  # a tuple cannot change under us, so being the same one says enough
            self._able[key] = (instances, able)
        else:
            self._able.pop(key, None)
        return able

    async def hash_prompt(self, work: Work, candidates: Sequence[Instance]) -> bool:
        """Hashes a prompt in steps, if that was not done and the router will look at its hashes. Whether it took any time."""
        if work.hashes is not None:
            return False
        hashes = self._router.prompt_hashes(_about_prompt(work), candidates)
        if hashes is None:
            return False
        for _ in hashes.steps():
            await asyncio.sleep(0)
        work.hashes = hashes
        return True

    async def missing_tokens(self, work: Work, candidates: Sequence[Instance]) -> int | None:
        """The fewest tokens of the prompt that one of `candidates` has not cached, as the router has it; None: not known."""
        await self.hash_prompt(work, candidates)
        return self._router.missing_tokens(_about_prompt(work), candidates)

    def _candidates(self, work: Work, call: Call, failed: Sequence[InstanceId]) -> Sequence[Instance]:
        able = self.able_to_serve(work.name or work.model, work.version, work.tokenizer, work.role)
        if call.instance is not None:
            return [instance for instance in able if instance.id == call.instance]
        if failed:
            able = tuple(instance for instance in able if instance.id not in failed)
        if self._refusing:
            now = self._loop.time()
            self._refusing = {instance: until for instance, until in self._refusing.items() if until > now}
            return tuple(instance for instance in able if instance.id not in self._refusing) or able
        return able

    def _is_disturbed(self, now: float) -> bool:
        """Our own connection is away, or came back so recently that the instances' may not have."""
        link = self._link
        return not link.is_connected or now - link.reconnected_at < self._retry.reconnect_grace_s

    def _note(self, instance: InstanceId, error: DynamoError) -> None:
        """Draws the conclusion from a failed attempt for other requests."""
        if not (error.retryable and isinstance(error, Unavailable)) or self._is_disturbed(self._loop.time()):
            return
        if isinstance(error, InstanceGone):
            if not error.is_alive:
                self._directory.mark_down(instance)
        else:
            until = self._loop.time() + self._retry.refusal_pause_s
            self._refusing[instance] = max(until, self._refusing.get(instance, 0.0))


class DispatchedStream:
    """One request, wherever it is being answered. Leaving it ends the request there and releases the booking."""

    __slots__ = (
        "_attempts",
        "_booking",
        "_call",
        "_deadline",
        "_dispatcher",
        "_ended",
        "_failed",
        "_failure",
        "_pause_s",
        "_stream",
        "_wait_until",
        "_work",
        "decision",
        "started",
        "trailer",
    )

    def __init__(self, dispatcher: Dispatcher, work: Work, call: Call) -> None:
        self._dispatcher = dispatcher
        self._work = work
        self._call = call
        self._deadline = dispatcher.deadline(call)
        self._stream: Stream | None = None
        self._booking = ""
        self._attempts = 0
        self._failed: list[InstanceId] = []
        self._pause_s = _FIRST_PAUSE_S
        self._wait_until: float | None = None
        self._ended = False
        self._failure: DynamoError | None = None
        self.decision: RoutingDecision | None = None
        """Where the request is, or was last; None before the first `read`."""
        self.started = False
        """Whether the instance in `decision` answered anything yet."""
        self.trailer: Buffer = b""
        """The last word of the instance, after `read` returned []."""
        dispatcher._budget.request()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request at its instance if it has not ended."""
        if self._ended:
            return
        self._failure = self._failure or Cancelled()
        if self._stream is not None:
            self._stream.cancel()
            self._release(self._failure)

    async def read(self) -> list[Buffer]:
        """All answers that arrived so far, at least one; [] at the end. Raises DynamoError; see `move` for what then."""
        if self._ended:
            return []
        while True:
            stream = self._stream or await self._open()
            try:
                bodies = await stream.read()
                break
            except DynamoError as error:
                await self._after_failure(stream, error)
        if not bodies:
            self.trailer = stream.trailer
            self._ended = True
            self._release(None)
        elif not self.started:
            self.started = True
            self._dispatcher._router.first_token(self._booking)
        return bodies

    async def result(self) -> Buffer:
        """The one answer of a request that has just one; however this ends, the stream is closed. Raises DynamoError."""
        try:
            while True:
                stream = self._stream or await self._open()
                try:
                    body = await stream.result()
                    break
                except DynamoError as error:
                    await self._after_failure(stream, error)
        except BaseException:
            self.close()
            raise
        self._ended = True
        self._release(None)
        return body

    async def move(self, error: DynamoError, work: Work) -> None:
        """After `read` raised `error` in the middle: lets another instance do `work`, the rest of it.

        Raises `error` if that may not be, by the rules for retries.
        """
        self.started = False
        self._attempts = 0
        await self._after(error)
        self._failure = None
        self._work = work

    def split(self, error: DynamoError, work: Work) -> DispatchedStream:
        """After `move`, with the same `error`: one more stream, for another part of the rest, under the same conditions.

        Raises `error` if the retry budget does not allow it.
        """
        dispatcher = self._dispatcher
        # Nothing has failed if it was our own connection that was away.
        if self._failed and not dispatcher._budget.take(dispatcher._loop.time()):
            raise error
        other = DispatchedStream(dispatcher, work, self._call)
        other._deadline = self._deadline
        other._failed = list(self._failed)
        other._attempts = self._attempts
        other._wait_until = self._wait_until
        return other

    def redirect(self, work: Work) -> None:
        """Before the first `read`, or after `move`: asks for `work` instead."""
        self._work = work

    async def _after_failure(self, stream: Stream, error: DynamoError) -> None:
        """After `error` at an instance: returns when another one may be asked, or raises what there is to say instead."""
        assert self.decision is not None
        self._dispatcher._note(self.decision.instance.id, error)
        self._release(error)
        try:
            if self.started or stream.started:
                raise error
            await self._after(error)
        except DynamoError as last:
            self._failure = last
            raise
        self._work.metrics.retries.inc()

    async def _open(self) -> Stream:
        """A stream at an instance that can do the work. Raises DynamoError, the same again if one did before."""
        if self._failure is not None:
            raise self._failure
        try:
            return await self._opened()
        except DynamoError as error:
            self._failure = error
            raise

    async def _opened(self) -> Stream:
        dispatcher = self._dispatcher
        while True:
            if self._deadline is not None and dispatcher._loop.time() >= self._deadline:
                raise DeadlineExceeded()
            error: Unavailable
            if not dispatcher._link.is_connected:
                error = Unavailable("the frontend has no connection to its workers now")
            elif candidates := dispatcher._candidates(self._work, self._call, self._failed):
                work, queue = self._work, dispatcher._queue
                if len(work.prompt) >= LONG_PROMPT_BYTES and await dispatcher.hash_prompt(work, candidates):
                    continue  # meanwhile, others had their turns
                if queue is None or self._call.instance is not None:
                    return self._book(candidates)
                if not queue.waiting(work.model, work.role):
                    try:
                        return self._book(candidates)
                    except Overloaded:
                        pass  # from here on in line
                stream = await self._queued(queue)
                if stream is not None:
                    return stream
                continue
            elif self._work.otherwise is not None:
                self._work = self._work.otherwise
                continue
            else:
                error = self._nobody()
            if not dispatcher._is_disturbed(dispatcher._loop.time()):
                raise error
            await self._wait(error)

    async def _queued(self, queue: AdmissionQueue) -> Stream | None:
        """Books when some instance may take more and it is this request's turn. None: the fleet is no longer what it was.

        Raises Overloaded if too many wait already, or for too long, and DeadlineExceeded.
        """
        dispatcher, work, call = self._dispatcher, self._work, self._call
        tokens = len(work.prompt) // TOKEN_BYTES + work.expected_output_tokens
        with queue.place(work.model, work.role, priority=call.priority, tokens=tokens, deadline=self._deadline) as place:
            while True:
                await place.turn()
                candidates = dispatcher._candidates(work, call, self._failed)
                if not candidates or not dispatcher._link.is_connected:
                    return None
                with contextlib.suppress(Overloaded):
                    return self._book(candidates)

    def _book(self, candidates: Sequence[Instance]) -> Stream:
        """Picks, books and opens in one step."""
        dispatcher, work, call = self._dispatcher, self._work, self._call
        booking = f"{dispatcher._origin}-{next(dispatcher._bookings):x}"
        began_ns = 0 if call.span is None else time.time_ns()
        decision = dispatcher._router.pick(
            RouteRequest(
                model=work.model,
                booking_id=booking,
                prompt=work.prompt,
                adapter=work.adapter,
                cache_salt=work.cache_salt,
                expected_output_tokens=work.expected_output_tokens,
                is_prefilled=work.is_prefilled,
                priority=call.priority,
                pinned=call.instance,
                session=call.session,
                overrides=call.overrides,
                hashes=work.hashes,
                request_id=call.request_id,
                explanation=call.explanation,
            ),
            candidates,
            explain=call.span is not None,
        )
        if call.span is not None:
            _trace_decision(call.span, began_ns, decision, len(candidates), self._attempts)
        self.decision = decision
        self._booking = booking
        instance = decision.instance
        headers = {**call.headers, REQUEST_ID_HEADER: call.request_id}
        if work.prompt:  # what has none is in no load report
            headers[BOOKING_HEADER] = booking
        try:
            self._stream = stream = dispatcher._client.open(
                instance.id,
                instance.subject,
                work.verb,
                work.body,
                headers=headers,
                deadline=self._deadline,
            )
        except DynamoError as error:
            self._release(error)
            raise
        except BaseException:
            self._release(DynamoError("the request could not be sent"))
            raise
        return stream

    def _release(self, error: DynamoError | None) -> None:
        self._stream = None
        dispatcher = self._dispatcher
        dispatcher._router.finished(self._booking, error)
        if dispatcher._queue is not None:
            dispatcher._queue.poke()

    def _nobody(self) -> Unavailable:
        if self._call.instance is None:
            return NoInstances(self._work.model)
        return Unavailable(f"instance {self._call.instance:x} does not serve model '{self._work.model}' now")

    async def _after(self, error: DynamoError) -> None:
        """Returns when the request may be sent again after `error`; raises `error` if it may not."""
        dispatcher, call = self._dispatcher, self._call
        assert self.decision is not None
        if not error.retryable:
            raise error
        now = dispatcher._loop.time()
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceeded() from error
        if isinstance(error, InstanceGone) and dispatcher._is_disturbed(now):
            return await self._wait(error)
        self._failed.append(self.decision.instance.id)
        self._attempts += 1
        if self._work.otherwise is not None:
            self._work = self._work.otherwise
        if (
            call.instance is not None
            or self._attempts >= dispatcher._retry.max_attempts
            or not dispatcher._candidates(self._work, call, self._failed)
            or not dispatcher._budget.take(now)
        ):
            raise error

    async def _wait(self, error: DynamoError) -> None:
        """Lets time pass while the bus comes back. Raises `error` when that takes too long."""
        dispatcher = self._dispatcher
        now = dispatcher._loop.time()
        if self._wait_until is None:
            self._wait_until = now + dispatcher._retry.disconnected_wait_s
        if now >= self._wait_until:
            raise error
        self._failed.clear()  # what failed before may be back, too
        until = self._wait_until if self._deadline is None else min(self._wait_until, self._deadline)
        if not dispatcher._link.is_connected:
            with contextlib.suppress(TimeoutError):  # the loop in `_opened` says which bound was reached
                async with asyncio.timeout_at(until):
                    await dispatcher._link.connected()
        # Everybody waits for the same workers: some earlier, some later, lest they be asked by all at once.
        pause_s = self._pause_s * (0.5 + random.random() / 2)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        await asyncio.sleep(min(pause_s, max(until - dispatcher._loop.time(), 0.0)))


def _about_prompt(work: Work) -> RouteRequest:
    return RouteRequest(
        model=work.model, prompt=work.prompt, adapter=work.adapter, cache_salt=work.cache_salt, hashes=work.hashes
    )


def _trace_decision(span: Span, began_ns: int, decision: RoutingDecision, candidates: int, failed: int) -> None:
    about: dict[str, str | int | float | bool] = {
        "dynamo.instance": f"{decision.instance.id:x}",
        "dynamo.route.reason": decision.reason,
        "dynamo.route.candidates": candidates,
        "dynamo.route.overlap_blocks": decision.overlap_blocks,
        "dynamo.route.cost": decision.cost,
        "dynamo.route.failed_attempts": failed,
    }
    if decision.candidates:  # by modes that look at loads
        about["dynamo.route.explanation"] = msgspec.json.encode(decision.candidates).decode()
    span.child("route", began_ns, time.time_ns(), about)
