"""Requests at instances: picked, booked and opened in one synchronous step, and released on every way out."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.generation import GRAMMAR_OWNER
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.messaging.request_plane.frames import READS_MANY
from dynamo.common.names import InstanceId
from dynamo.common.observability.tracing import Span
from dynamo.common.tensors.request import SEQUENCE_OWNER
from dynamo.frontend.router.base import Router, RoutingDecision
from dynamo.frontend.serving.call import Call, Stream, Work
from dynamo.frontend.serving.dispatch.circuits import Circuits

REQUEST_ID_HEADER = "request-id"
"""Where `messaging.request_plane.incoming` looks for the request id."""

BOOKING_HEADER = "booking"
"""Names the booking to the worker, which names it in its load reports."""


class Booking(msgspec.Struct, eq=False):
    """A request at one instance, which the router counts as load until it is released or cancelled."""

    _booker: Booker
    id: str
    decision: RoutingDecision
    stream: Stream
    is_probe: bool = False
    """Whether it tries a half-open circuit."""
    _is_counted: bool = True
    """False: the caller named the instance."""
    _is_released: bool = False

    def __repr__(self) -> str:
        state = "released" if self._is_released else "started" if self.stream.started else "sent"
        return f"<Booking {self.id} at instance {self.decision.instance.id:x}, {state}>"

    def cancel(self, error: DynamoError) -> None:
        """End the request at its instance, if it has not ended, and release the booking."""
        self.stream.cancel()
        self.release(error)

    def release(self, error: DynamoError | None) -> None:
        """The request is over, with success (None) or `error`. Calls after the first have no effect."""
        if not self._is_released:
            self._is_released = True
            circuits = self._booker.circuits
            if (error is not None or circuits.is_watching) and self._is_counted:
                circuits.ended(self.decision.instance, error, is_probe=self.is_probe)
            self._booker.release(self.id, self.decision.instance.id, error)


class Booker:
    """Picks instances and books requests on them. One per process."""

    def __init__(
        self, router: Router, client: RequestClient, circuits: Circuits, on_released: Callable[[InstanceId], None] | None
    ) -> None:
        """`on_released` is called after each release, with the instance."""
        self.router = router
        self.circuits = circuits
        self._client = client
        self._on_released = on_released
        # Clients choose request ids and may use one twice; bookings have ids of their own, unique among frontends too.
        self._origin = secrets.token_hex(6)
        self._numbers = itertools.count()

    def book(
        self,
        work: Work,
        call: Call,
        candidates: Sequence[Instance],
        *,
        deadline: float | None,
        failed_attempts: int,
    ) -> Booking:
        """Book the request on one of `candidates` and send it there. Raises DynamoError, Overloaded if none may take more."""
        if self.circuits.are_open:
            work.open_circuits = self.circuits.count_open(work.model)
        work.booking_id = booking_id = f"{self._origin}-{next(self._numbers):x}"
        began_ns = 0 if call.span is None else time.time_ns()
        decision = self.router.pick(work, candidates, explain=call.span is not None)
        if call.span is not None:
            _trace_decision(call.span, began_ns, decision, len(candidates), failed_attempts)
        instance = decision.instance
        headers = {**call.headers, REQUEST_ID_HEADER: call.request_id}
        if work.prompt:  # what has none is in no load report
            headers[BOOKING_HEADER] = booking_id
            headers[READS_MANY] = ""  # a token is a response
        if work.sequence_owner:
            headers[SEQUENCE_OWNER] = work.sequence_owner
        if work.grammar_owner:
            headers[GRAMMAR_OWNER] = work.grammar_owner
        stream: Stream
        try:
            if work.carried is not None:
                stream = work.carried.place(work, decision, candidates, work.verb, work.body)
            else:
                stream = self._client.open(
                    *(instance.id, instance.subject, work.verb, work.body),
                    headers=headers,
                    deadline=deadline,
                    arena=instance.arena,
                )
        except BaseException as error:
            failure = error if isinstance(error, DynamoError) else DynamoError("the request could not be sent")
            self.release(booking_id, instance.id, failure)
            raise
        is_counted = work.pinned is None
        is_probe = self.circuits.are_open and is_counted and not work.sequence and self.circuits.sent(instance)
        return Booking(self, booking_id, decision, stream, is_probe, is_counted)

    def release(self, booking_id: str, instance: InstanceId, error: DynamoError | None) -> None:
        """Tell the router that a booked request is over. Bookings call this."""
        self.router.finished(booking_id, error)
        if self._on_released is not None:
            self._on_released(instance)

    async def hash_prompt(self, work: Work, candidates: Sequence[Instance]) -> bool:
        """Hash a prompt in steps, if the router will look at its hashes. Return whether other tasks may have run meanwhile."""
        if work.hashes is not None:
            return False
        hashes = self.router.prompt_hashes(work, candidates)
        if hashes is None:
            return False
        for _ in hashes.steps():
            await asyncio.sleep(0)
        work.hashes = hashes
        return True

    async def missing_tokens(self, work: Work, candidates: Sequence[Instance]) -> int | None:
        """Return the fewest tokens of the prompt that one of `candidates` has not cached, as the router has it; None: unknown."""
        await self.hash_prompt(work, candidates)
        return self.router.missing_tokens(work, candidates)

    def missing_tokens_with_room(self, work: Work, candidates: Sequence[Instance]) -> int | None:
        """The same of those of `candidates` that are not busy; None also if all are, or if no threshold says which."""
        return self.router.missing_tokens(work, candidates, with_room=True)


def _trace_decision(span: Span, began_ns: int, decision: RoutingDecision, candidates: int, failed: int) -> None:
    attributes: dict[str, str | int | float | bool] = {
        "dynamo.instance": f"{decision.instance.id:x}",
        "dynamo.route.reason": decision.reason,
        "dynamo.route.candidates": candidates,
        "dynamo.route.overlap_blocks": decision.overlap_blocks,
        "dynamo.route.cost": decision.cost,
        "dynamo.route.failed_attempts": failed,
    }
    if decision.candidates:  # by modes that look at loads
        attributes["dynamo.route.explanation"] = msgspec.json.encode(decision.candidates).decode()
    span.child("route", began_ns, time.time_ns(), attributes)
