"""What follows a failed attempt: a decision without I/O, and a budget for each model and API key.

A failed attempt is repeated

1. only if the error says that it may be (`retryable`), and only before the first frame was delivered;
2. only on another instance or, where there is none, on one that got or sent only a part of it, and never if the caller named the
   instance;
3. only inside the deadline, `max_attempts` and the retry budget, of which a refusal that cost no work takes nothing;
4. only once after an instance died while it held the request, since the request may be what killed it. After a second death it
   fails; deaths after a response had begun count as well.

A client that repeats such a request would end two instances each time, so what two instances died of in a row is refused for
`QUARANTINE_S`. Only requests with the same schema or grammar count as the same, whatever their prompts (`Work.fingerprint`):
ordinary ones are in flight whenever an instance dies. A response clears them, so a schema that a fleet serves all the time is not
suspected for deaths that have other causes: requests that were in flight at those are repeated, and one response is enough.

While our own NATS connection is silent, and for `reconnect_grace_s` after it was away, this is different: what seems to be an
instance's failure is probably ours, or the instances have lost their connections too and come back. Then requests wait a moment,
and are sent to the same instance again when all others have failed them, too. The same holds for as long after our connection was
first made, at instances that have not responded to anything yet: they may still come back from the same outage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InstanceGone, InvalidRequest
from dynamo.common.names import InstanceId
from dynamo.frontend.config import RetryOptions

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_MAX_DEATHS = 1
"""Instances that may die while they hold one request before the request is blamed."""
QUARANTINE_S = 600.0
"""How long a schema or grammar is refused after the last instance died that held it."""
_MAX_SUSPICIONS = 1024
MAX_BUDGETS = 4096
"""Above it, the budget that was made first is forgotten, and made anew when there is a request for it."""

LINK_REASON = "link"
"""Label of a retry after our own connection to NATS was away or silent."""


class Verdict(Enum):
    RETRY = "retry"
    """Send the request to another instance, if the budget allows it."""
    WAIT = "wait"
    """Let time pass while the connection comes back, then send it to any instance."""
    RAISE = "raise"
    """Raise the error."""
    BLAME = "blame"
    """Raise EngineError: the request seems to kill instances."""
    EXPIRE = "expire"
    """Raise DeadlineExceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One failed attempt, and the state of affairs at its end."""

    number: int = 1
    """Instances that have failed the request, this one included."""
    deaths: int = 0
    """Instances that died while they held the request, this one included; also before the stream was moved."""
    was_sent: bool = True
    """False: it failed for want of an instance, or of a connection."""
    is_delivered: bool = False
    """A part of the response has reached the caller."""
    is_pinned: bool = False
    """The caller named the instance."""
    has_alternative: bool = True
    """There is an instance that has not failed the request."""
    is_disturbed: bool = False
    """Our own connection is away or silent, or came back so recently that those of the instances may not have."""
    deadline: float | None = None
    gives_up_at: float | None = None
    """When a request without a deadline stops waiting for the connection; None: it has not waited yet."""


class RetryPolicy:
    def __init__(self, options: RetryOptions) -> None:
        self._max_attempts = options.max_attempts
        self.longest_wait_s = options.disconnected_wait_s
        """How long a request without a deadline waits for the connection, over all its attempts."""

    def decide(self, error: DynamoError, attempt: Attempt, now: float) -> Verdict:
        """Return what follows after `attempt` failed with `error`."""
        if attempt.is_delivered or not error.retryable:
            return Verdict.RAISE
        if attempt.deadline is not None and now >= attempt.deadline:
            return Verdict.EXPIRE
        if attempt.deaths > _MAX_DEATHS:
            return Verdict.BLAME
        if attempt.is_disturbed and (isinstance(error, InstanceGone) or not attempt.was_sent):
            return Verdict.WAIT if attempt.gives_up_at is None or now < attempt.gives_up_at else Verdict.RAISE
        if attempt.is_pinned or attempt.number >= self._max_attempts or not attempt.has_alternative:
            return Verdict.RAISE
        return Verdict.RETRY

    @staticmethod
    def pause_s(waits: int, jitter: float) -> float:
        """Return how long to pause after so many earlier pauses; `jitter`, 0 to 1, spreads requests that wait for the same."""
        return min(_FIRST_PAUSE_S * 2.0 ** min(waits, 10), _LONGEST_PAUSE_S) * (0.5 + jitter / 2)


def died_holding(error: DynamoError) -> bool:
    """Return whether `error` says that an instance died while it may have worked on the request."""
    return isinstance(error, InstanceGone) and error.was_held and not error.is_alive


def was_lost_on_the_way(error: DynamoError) -> bool:
    """Return whether `error` says that a part of the request or its response did not arrive: the instance may well serve it."""
    return isinstance(error, InstanceGone) and error.is_alive


def cost_no_work(error: DynamoError) -> bool:
    """Return whether `error` says that an instance only looked at the request, as for a sequence that began elsewhere."""
    return isinstance(error, InvalidRequest)


def reason_of(error: DynamoError) -> str:
    """Return the label under which a retry after `error` is counted, apart from LINK_REASON."""
    if isinstance(error, InstanceGone):
        return "died" if died_holding(error) else "lost"
    return error.code.value


class Attempts(msgspec.Struct, eq=False):
    """The failed attempts of one request."""

    number: int = 0
    """Instances that have failed it; counted anew after a move."""
    deaths: int = 0
    """How many instances died while they held it, before a move too."""
    failed: list[InstanceId] = []
    """Instances that are not sent it again."""
    lost: list[InstanceId] = []
    """Instances to or from which a part of the request was lost: they may serve it if no other can."""
    waits: int = 0
    gives_up_at: float | None = None
    starts_by: float | None = None
    """When it stops waiting for the first instance of its model; None: it has not waited for that yet."""
    has_waited_for_end: bool = False
    """It has waited for the end of an instance that failed it and was registered still."""

    def copy(self) -> Self:
        return msgspec.structs.replace(self, failed=list(self.failed), lost=list(self.lost))


class Suspects:
    """What instances died of, perhaps, by fingerprint: see this module's text."""

    def __init__(self) -> None:
        self._suspicions: dict[bytes, _Suspicion] = {}
        """The latest last; what has expired is dropped when there are too many."""

    def died(self, fingerprint: bytes, instance: InstanceId, now: float) -> None:
        """An instance died while it held a request with this fingerprint."""
        if not fingerprint:
            return
        suspicion = self._suspicions.pop(fingerprint, None)
        if suspicion is None or now >= suspicion.until:
            suspicion = _Suspicion()
        suspicion.instances.add(instance)
        suspicion.until = now + QUARANTINE_S
        self._suspicions[fingerprint] = suspicion
        if len(self._suspicions) > _MAX_SUSPICIONS:
            del self._suspicions[next(iter(self._suspicions))]

    def responded(self, fingerprint: bytes) -> None:
        """A request with this fingerprint got its response."""
        if self._suspicions:
            self._suspicions.pop(fingerprint, None)

    def check(self, fingerprint: bytes, now: float) -> None:
        """Raise EngineError for what instances died of."""
        suspicion = self._suspicions.get(fingerprint) if self._suspicions else None
        if suspicion is not None and len(suspicion.instances) > _MAX_DEATHS and now < suspicion.until:
            raise EngineError(
                f"{len(suspicion.instances)} instances died while they held requests with this schema or grammar, so it is "
                f"refused for {QUARANTINE_S / 60:.0f} minutes"
            )


@dataclass(slots=True)
class _Suspicion:
    instances: set[InstanceId] = field(default_factory=set)
    """Instances that died while they held a request with the fingerprint."""
    until: float = 0.0


class RetryBudget:
    """A token bucket that grows with requests and with time, so that retries stay a fraction of the traffic."""

    def __init__(self, options: RetryOptions, now: float) -> None:
        self._ratio = options.ratio
        self._per_s = options.floor_per_s
        self._burst = float(options.burst)
        self._left = self._burst
        self._filled_at = now

    def request(self) -> None:
        """A request came in."""
        self._left = min(self._burst, self._left + self._ratio)

    def take(self, now: float) -> bool:
        """Return whether one retry may be made now, and count it."""
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RetryBudgets:
    """A budget for each model and API key, so that no key and no model uses up the retries of another."""

    def __init__(self, options: RetryOptions, now: float) -> None:
        self._options = options
        self._opened_at = now
        self._budgets: dict[tuple[str, str], RetryBudget] = {}

    def request(self, model: str, owner: str) -> RetryBudget:
        """Return the budget of a request that came in, and count it there."""
        budget = self._budgets.get((model, owner))
        if budget is None:
            if len(self._budgets) >= MAX_BUDGETS:
                del self._budgets[next(iter(self._budgets))]
            budget = self._budgets[model, owner] = RetryBudget(self._options, self._opened_at)
        budget.request()
        return budget
