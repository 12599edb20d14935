"""Circuit breakers: an instance whose engine fails too many requests of a model gets none of them for a while.

    closed ──(enough of its requests failed, and other instances do better)──▶ open
    open ──(its time has passed)──▶ half-open: one request at a time is sent there
    half-open ──(that many in a row succeed)──▶ closed
    half-open ──(one fails)──▶ open, twice as long as the last time

Errors of engines count, and neither those of clients nor of connections, which `Candidates.failed` handles, nor requests that
name their instance. Nothing is counted while nothing fails: the first failure of an instance begins a record, which ends when
there was none for a while. Each process of a frontend has circuits of its own.

Requests that fail everywhere, as those with an input that a model cannot take, open nothing: half of the other instances that are
closed must fail less than half as often. And no more than a share of the instances of one model and role is open at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import Code, DynamoError, EngineError
from dynamo.common.names import InstanceId
from dynamo.frontend.config import CircuitOptions

log = logging.getLogger(__name__)

WINDOW_S = 30.0
"""What a record counts is halved this often, and a record without a failure in that time ends."""
LONGEST_OPEN_S = 300.0
PROBES = 5
"""Requests that must succeed in a row at a half-open instance. One that fails half of them passes once in 32 times."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class _Circuit(msgspec.Struct, eq=False):
    """One instance of one model that has failed a request lately."""

    since: float
    """When the counts were halved last."""
    state: CircuitState = CircuitState.CLOSED
    requests: float = 0.0
    failures: float = 0.0
    until: float = 0.0
    """When an open circuit becomes half-open."""
    opened: int = 0
    """How often it was opened; 0 again once it had no failure for a while."""
    succeeded: int = 0
    """Probes in a row."""
    is_probing: bool = False

    @property
    def share(self) -> float:
        """The share of requests that failed."""
        return self.failures / self.requests if self.requests else 0.0


_Key = tuple[str, InstanceId]


OnCircuit = Callable[[str, int, bool], None]
"""Called with a model, how many of its circuits are open or half-open now, and whether one has just been opened (again)."""


class Circuits:
    """The circuits of all instances, as this process sees them."""

    def __init__(
        self,
        options: CircuitOptions,
        instances: Callable[[str], Sequence[Instance]],
        clock: Callable[[], float],
        on_change: OnCircuit,
    ) -> None:
        """`instances` returns those of a model."""
        self.are_open = False
        """Whether `admits` may be false for some instance. Cheap to test, as is `is_watching`."""
        self.is_watching = False
        """Whether there is a record, so that success counts, too."""
        self.next_change_at = math.inf
        """When the next open circuit becomes half-open."""
        self.version = 0
        """Counts the changes of what `admits` returns."""
        self._options = options
        self._instances = instances
        self._clock = clock
        self._on_change = on_change
        self._records: dict[_Key, _Circuit] = {}
        self._open: dict[_Key, _Circuit] = {}
        """Open and half-open ones."""

    def __repr__(self) -> str:
        return f"<Circuits, {len(self._open)} of {len(self._records)} records open>"

    def state(self, model: str, instance: InstanceId) -> CircuitState:
        """Return the state of an instance for requests to a model, by the model's own name."""
        self.advance()
        record = self._open.get((model, instance))
        return CircuitState.CLOSED if record is None else record.state

    def count_open(self, model: str) -> int:
        """Return how many circuits of a model are open or half-open."""
        return sum(name == model for name, _ in self._open)

    def admits(self, instance: Instance) -> bool:
        """Return whether a request may be sent to an instance."""
        record = self._open.get((instance.card.name, instance.id))
        return record is None or (record.state is CircuitState.HALF_OPEN and not record.is_probing)

    def advance(self) -> None:
        """Make those half-open whose time has passed."""
        now = self._clock()
        if now < self.next_change_at:
            return
        for record in self._open.values():
            if record.state is CircuitState.OPEN and record.until <= now:
                record.state, record.succeeded, record.is_probing = CircuitState.HALF_OPEN, 0, False
        self._changed()

    def sent(self, instance: Instance) -> bool:
        """A request was sent to an instance. Return whether it is a probe of a half-open one, whose result decides."""
        record = self._open.get((instance.card.name, instance.id))
        if record is None or record.state is not CircuitState.HALF_OPEN or record.is_probing:
            return False
        record.is_probing = True
        self._changed()
        return True

    def ended(self, instance: Instance, error: DynamoError | None, *, is_probe: bool) -> None:
        """A request at an instance is over, with success (None) or `error`."""
        has_failed = isinstance(error, EngineError) and error.code is Code.INTERNAL
        key = instance.card.name, instance.id
        record = self._records.get(key)
        if record is None:
            if not (has_failed and self._options.enabled and self._is_registered(instance)):
                return
            record = self._records[key] = _Circuit(self._clock())
            self.is_watching = True
        if is_probe:
            self._probed(key, record, has_failed, error)
        elif record.state is CircuitState.CLOSED and (has_failed or error is None):
            self._count(key, record, has_failed, instance)

    def removed(self, instance: InstanceId) -> None:
        """An instance deregistered."""
        for key in [key for key in self._records if key[1] == instance]:
            self._end(key)

    def _count(self, key: _Key, record: _Circuit, has_failed: bool, instance: Instance) -> None:
        now = self._clock()
        if now - record.since >= WINDOW_S:
            if record.failures < 1.0 and not has_failed:
                return self._end(key)
            halvings = min((now - record.since) // WINDOW_S, 64.0)
            record.requests, record.failures = record.requests / 2.0**halvings, record.failures / 2.0**halvings
            record.since += halvings * WINDOW_S
        record.requests += 1.0
        if not has_failed:
            return
        record.failures += 1.0
        options = self._options
        if record.failures >= options.min_failures and record.share >= options.failure_share and self._may_open(record, instance):
            self._open_circuit(key, record)

    def _is_registered(self, instance: Instance) -> bool:
        return any(each.id == instance.id for each in self._instances(instance.card.name))

    def _may_open(self, record: _Circuit, instance: Instance) -> bool:
        """Return whether others do better, and enough of them are left."""
        model, role = instance.card.name, instance.card.role
        others = [each.id for each in self._instances(model) if each.card.role is role and each.id != instance.id]
        closed = [each for each in others if (model, each) not in self._open]
        allowed = int(self._options.max_open_share * (len(others) + 1))
        if not closed or len(others) - len(closed) >= allowed:
            return False
        shares = [0.0 if (other := self._records.get((model, each))) is None else other.share for each in closed]
        return 2 * sum(2 * share < record.share for share in shares) >= len(shares)

    def _open_circuit(self, key: _Key, record: _Circuit) -> None:
        record.state = CircuitState.OPEN
        open_s = min(self._options.open_s * 2.0 ** min(record.opened, 32), max(LONGEST_OPEN_S, self._options.open_s))
        record.until = self._clock() + open_s
        record.opened += 1
        record.requests = record.failures = 0.0
        record.is_probing = False
        self._open[key] = record
        log.warning("the circuit of instance %x for model %s is open for %g s: too many requests failed", key[1], key[0], open_s)
        self._changed(key[0], has_opened=True)

    def _probed(self, key: _Key, record: _Circuit, has_failed: bool, error: DynamoError | None) -> None:
        record.is_probing = False
        if has_failed:
            return self._open_circuit(key, record)
        record.succeeded += error is None
        if record.succeeded >= PROBES:
            record.state, record.since = CircuitState.CLOSED, self._clock()
            del self._open[key]
            log.info("the circuit of instance %x for model %s is closed again", key[1], key[0])
        self._changed(key[0])

    def _end(self, key: _Key) -> None:
        del self._records[key]
        self.is_watching = bool(self._records)
        if self._open.pop(key, None) is not None:
            self._changed(key[0])

    def _changed(self, model: str = "", *, has_opened: bool = False) -> None:
        self.version += 1
        self.are_open = bool(self._open)
        opened = (record.until for record in self._open.values() if record.state is CircuitState.OPEN)
        self.next_change_at = min(opened, default=math.inf)
        if model and self._instances(model):
            self._on_change(model, self.count_open(model), has_opened)
