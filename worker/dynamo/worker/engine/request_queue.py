"""The queue of requests of one model: priority levels, each with a policy of timeouts and a greatest size, as in Triton.

Requests leave the queue in the order of their levels, the most urgent first, and of their arrival. One whose timeout passes while
it waits is rejected, or delayed: then it waits behind the others of its level, as long as that takes, and those that are delayed
leave in the order of their arrival, whichever timeout was shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from dynamo.common.errors import Overloaded, Unavailable

DEFAULT_QUEUE_SIZE = 1024


class TimeoutAction(StrEnum):
    """What happens to a request whose timeout passes in the queue."""

    REJECT = "reject"
    DELAY = "delay"


class QueueTimeout(Unavailable):
    """The request waited longer than the model's queue policy, or its own timeout, allows."""

    retryable = False

    def __init__(self) -> None:
        super().__init__("Request timeout expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """How requests of one level wait."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    timeout_us: int = 0
    """0: requests wait for as long as it takes."""
    allow_timeout_override: bool = False
    """Whether a request may have a shorter timeout; a longer one changes nothing."""
    max_size: int = DEFAULT_QUEUE_SIZE
    """Requests waiting; more are refused as overload."""

    def timeout_s(self, requested_us: int) -> float | None:
        """Return the timeout of a request that asks for `requested_us`, which is 0 if it does not; None: it has none."""
        if not self.timeout_us:
            return None
        has_shorter = self.allow_timeout_override and 0 < requested_us < self.timeout_us
        return (requested_us if has_shorter else self.timeout_us) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicies:
    """The levels of a queue, and the policy of each."""

    levels: int = 0
    """Requests have the priorities 1, the most urgent, to `levels`."""
    default_level: int = 0
    """Level of requests with no priority, or one above `levels`."""
    default: QueuePolicy = field(default_factory=QueuePolicy)
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether requests simply wait in the order of their arrival."""
        return not self.levels and self.default == QueuePolicy()

    def level(self, priority: int) -> int:
        return priority if 1 <= priority <= self.levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.default)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What a request says about its place in the queue."""

    priority: int = 0
    """0: the default of the model."""
    timeout_us: int = 0
    """0: that of the policy."""
    request_id: str = ""
    """As the client named it, for errors."""

    @classmethod
    def of(cls, request_id: str, parameters: Mapping[str, object]) -> QueueOptions:
        """Read the parameters `priority` and `timeout` of a request."""
        return cls(_whole(parameters.get("priority")), _whole(parameters.get("timeout")), request_id)


NO_OPTIONS = QueueOptions()


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


class Queued:
    """What can wait in a queue."""

    __slots__ = ("arrival", "expiry", "line")

    def __init__(self) -> None:
        self.arrival = 0
        """How many came to its queue before."""
        self.line: tuple[int, bool] | None = None
        """Its level, and whether it is delayed; None: it is not in the queue."""
        self.expiry: asyncio.TimerHandle | None = None


Q = TypeVar("Q", bound=Queued)


class RequestQueue(Generic[Q]):
    """Iterates over its requests in the order in which they should leave it."""

    def __init__(self, policies: QueuePolicies, on_change: Callable[[], None], reject: Callable[[Q, QueueTimeout], None]) -> None:
        """`on_change` is called when timeouts have changed the order, `reject` with a request that has left by its timeout."""
        self._policies = policies
        self._on_change = on_change
        self._reject = reject
        self._lines: dict[tuple[int, bool], dict[Q, None]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Q]:
        for line in sorted(self._lines):
            yield from self._lines[line]

    def add(self, request: Q, options: QueueOptions) -> None:
        """Raises Overloaded if the requests of its level are too many."""
        level = self._policies.level(options.priority)
        policy = self._policies.policy(level)
        waiting, delayed = self._lines.get((level, False), ()), self._lines.get((level, True), ())
        if len(waiting) + len(delayed) >= policy.max_size:
            raise Overloaded(f"[request id: {options.request_id[:200] or '<id_unknown>'}] Exceeds maximum queue size")
        self._put(request, (level, False))
        request.arrival = self._arrivals
        self._arrivals += 1
        timeout_s = policy.timeout_s(options.timeout_us)
        if timeout_s is not None:
            expire = asyncio.get_running_loop().call_later
            request.expiry = expire(timeout_s, self._expire, request, policy.timeout_action)

    def remove(self, request: Q) -> None:
        """Take a request out of the queue, if it is there."""
        if request.expiry is not None:
            request.expiry.cancel()
            request.expiry = None
        if request.line is not None:
            line = self._lines[request.line]
            del line[request]
            if not line:
                del self._lines[request.line]
            request.line = None

    def _put(self, request: Q, line: tuple[int, bool]) -> None:
        request.line = line
        self._lines.setdefault(line, {})[request] = None

    def _delay(self, request: Q, line: tuple[int, bool]) -> None:
        """Put a request before those of a line that came after it."""
        waiting = self._lines.get(line, {})
        later = [other for other in waiting if other.arrival > request.arrival]
        self._put(request, line)
        for other in later:
            self._lines[line][other] = self._lines[line].pop(other)

    def _expire(self, request: Q, action: TimeoutAction) -> None:
        line = request.line
        self.remove(request)
        if line is not None and action is TimeoutAction.DELAY:
            self._delay(request, (line[0], True))
        else:
            self._reject(request, QueueTimeout())
        self._on_change()
