"""Requests that wait for an instance while all are busy.

Which instances are busy is for the router to say: it raises Overloaded when none may take more. Without a queue the request is
refused then. With one, up to so many requests per model wait, and the first in the queue tries again whenever a request ends and
every few milliseconds. Requests of different API keys have their turns in proportion to the weights of the keys, measured in
tokens (see `fair_queue`), over all frontends together (see `fair_share`). Which one of a key is first:

| policy | order |
|---|---|
| `fcfs` | higher priority first, of whichever key; of equal ones of a key, the earlier |
| `prefix` | as `fcfs`, but of the next 32 the one that has most of its prompt cached where there is room, see `queue_order` |
| `wspt` | most priority per token first: (1 + priority) / (prompt tokens + expected output tokens) |

Negative priorities count as 0 there. `wspt` makes the mean wait short at the expense of long requests, which may wait as long as
shorter ones of the same key keep coming.

A request is refused at once if, by the recent pace, its turn would come after its deadline, or if the queue is full. Then
another one may be refused instead: of those with the lowest priority the longest, if the new one is more important (but not with
`wspt`); or the last one of the key that has the most in it, if another key sends the new one. Where prompts are computed apart,
requests wait for prefill instances in one queue and for decode instances in another.

A request that names its instance waits as others do. When it has its turn and its instance is busy, those behind it
that may go elsewhere have theirs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from dynamo.common.errors import DeadlineExceeded, Overloaded
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import QueuePolicy
from dynamo.frontend.router.base import TooLate
from dynamo.frontend.router.demand import WaitingRequests
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.serving.queue.fair_queue import FairQueue
from dynamo.frontend.serving.queue.fair_share import FairShares, QueueShare
from dynamo.frontend.serving.queue.queue_order import nearest_to_caches, rank_and_order, rank_of

_RETRY_S = 0.02
"""Loads also change by reports, of which the queue is not notified."""
_BUSY_AT_ONCE = 8
"""So many busy instances that requests name are tried again after `_RETRY_S`; more of them later, in proportion."""
_PACE_WEIGHT = 0.2
_DESCRIBED = 32
"""Requests of a queue from which the tokens of all that wait there are estimated."""


class QueuePosition:
    """One request's position in a queue; a context manager, at whose end the next request gets its turn."""

    __slots__ = (
        "_deadline",
        "_entered_at",
        "_loop",
        "_order",
        "_queue",
        "_turn",
        "_waited",
        "demand",
        "displaced",
        "instance",
        "key",
        "missing_tokens",
        "number",
        "rank",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        queue: _ModelQueue,
        account: Account,
        rank: float,
        order: tuple[float, int],
        tokens: int,
        deadline: float | None,
        missing_tokens: Callable[[], int | None],
        demand: Callable[[], tuple[Role, int]],
        instance: InstanceId | None,
        waited: Callable[[float], None],
    ) -> None:
        """`rank` is compared with those of other keys, `order` with those of the same key.

        `waited` is called with the seconds that the request waited, when it leaves.
        """
        self.displaced: tuple[QueuePosition, Overloaded] | None = None
        """The one that has to leave a full queue for this one, and why."""
        self.missing_tokens = missing_tokens
        self.demand = demand
        """Returns the role of the instances that it waits for, and how many tokens of its prompt none of them has cached."""
        self.instance = instance
        """The only one that may serve the request; None: any."""
        self.number = order[1]
        self.key = account.name
        self.weight = account.weight
        self.rank = rank
        self.tokens = tokens
        self._order = order
        self._queue = queue
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[None] | None = None
        self._waited = waited
        self._entered_at = 0.0

    def __lt__(self, other: object) -> bool:
        return isinstance(other, QueuePosition) and self._order < other._order

    def __enter__(self) -> Self:
        if self.displaced is not None:
            self._queue.displace(*self.displaced)
        self._entered_at = self._loop.time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, TooLate):
            self._queue.refused("goal")
        self._queue.leave(self, served=kind is None)
        self._waited(self._loop.time() - self._entered_at)

    async def turn(self) -> None:
        """Return when this request is the one to try. Raises DeadlineExceeded, and Overloaded if it has to leave the queue."""
        self._turn = self._loop.create_future()
        self._queue.enter(self)
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._turn
        except TimeoutError:
            self._queue.refused("expired")
            raise DeadlineExceeded() from None

    def call(self) -> None:
        """Give this request its turn."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def refuse(self, error: Overloaded) -> None:
        """Let `turn` raise an error."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)


class _ModelQueue:
    """The requests that wait for one model. At most one of them tries at a time."""

    def __init__(
        self,
        changed: Callable[[], None],
        refused: Callable[[str], None],
        choose: Callable[[Sequence[QueuePosition]], QueuePosition] | None,
        share: QueueShare,
    ) -> None:
        self.interval_s = 0.0
        """Between two turns that led to an instance, smoothed; 0: not known yet."""
        self.refused = refused
        self._share = share
        share.on_asked(self._heads)
        self._loop = asyncio.get_running_loop()
        self._waiting: FairQueue[QueuePosition] = FairQueue()
        self._trying: QueuePosition | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Until then no request tries."""
        self._busy: set[InstanceId] = set()
        """Instances that had no room for a request that names them: others that do so do not try."""
        self._busy_timer: asyncio.TimerHandle | None = None
        """When that is forgotten: loads also change by reports."""
        self._busy_before = 0
        """How many there were the last time."""
        self._paced_from = 0.0
        """When the last turn led to an instance, or a request entered an empty queue: pauses do not count for the pace."""
        self._changed = changed
        self._choose = choose
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def __len__(self) -> int:
        return len(self._waiting) + (self._trying is not None)

    def demand(self) -> tuple[Role, WaitingRequests]:
        """Return the role of the instances that requests wait for, and how many do, at least one."""
        described = [position.demand() for position in itertools.islice(self._positions(), _DESCRIBED)]
        tokens = sum(missing_tokens for _, missing_tokens in described) * len(self) // len(described)
        return described[0][0], WaitingRequests(len(self), tokens)

    def _positions(self) -> Iterator[QueuePosition]:
        if self._trying is not None:
            yield self._trying
        yield from self._waiting

    def before(self, position: QueuePosition) -> int:
        """Return about how many requests have their turn earlier."""
        return self._waiting.before(position) + (self._trying is not None)

    def less_important(self, position: QueuePosition) -> QueuePosition | None:
        """Return a less important request than `position`, or the last one of the key with the most.

        None if there is neither: all are as important, and `position`'s own key has as many.
        """
        last = max(self._waiting, key=lambda each: (each.rank, each.tokens), default=None)
        if last is None or last.rank <= position.rank:
            last = self._waiting.last_of_longest(position)
        return last

    def displace(self, position: QueuePosition, error: Overloaded) -> None:
        """Let a request leave the queue, with an error."""
        self.refused("full")
        self._waiting.remove(position)
        position.refuse(error)

    def enter(self, position: QueuePosition) -> None:
        """A request waits for its turn, for the first time or after a try that failed."""
        failed = self._trying is position
        if failed:
            self._trying = None
            self._share.failed()
        elif not len(self):
            self._paced_from = self._loop.time()
        self._waiting.push(position)
        self._changed()
        self._share.waits()
        if failed and position.instance is not None:
            self._busy.add(position.instance)
            if self._busy_timer is None:
                self._busy_timer = self._loop.call_later(
                    _RETRY_S * max(1.0, self._busy_before / _BUSY_AT_ONCE), self._forget_busy
                )
        if not failed or position.instance is not None:
            self.advance()
        elif self._timer is None:
            self._timer = self._loop.call_later(_RETRY_S, self._again)

    def leave(self, position: QueuePosition, *, served: bool) -> None:
        if self._trying is position:
            self._trying = None
        elif position in self._waiting:
            self._waiting.remove(position)
        if served:
            self._waiting.charge(position.key, position.tokens, position.weight)
            self._share.served(position.key, position.tokens / position.weight)
            self._pace()
        self._changed()
        self.advance()

    def advance(self) -> None:
        """Let the first in the queue try, unless another request is trying, or one at another frontend is before it."""
        if self._trying is None and self._waiting and self._timer is None:
            may = self._may_try if self._busy else None
            first = self._waiting.next(self._share.served_in_all(), may)
            if first is None:
                return
            if self._share.holds_back(first.key, first.rank):
                self._timer = self._loop.call_later(_RETRY_S, self._again)
                return
            self._trying = self._waiting.pop(first, self._choose, may)
            self._trying.call()

    def _may_try(self, position: QueuePosition) -> bool:
        return position.instance is None or position.instance not in self._busy

    def poke(self, instance: InstanceId) -> None:
        """A request has ended, so `instance` may take another one."""
        self._busy.discard(instance)
        if self._timer is not None:
            self._timer.cancel()
        self._again()

    def _again(self) -> None:
        self._timer = None
        self.advance()

    def _forget_busy(self) -> None:
        self._busy_timer = None
        self._busy_before = len(self._busy)
        self._busy.clear()
        self.advance()

    def _heads(self) -> Iterator[tuple[str, float]]:
        """Yield each key that waits, with the rank of its first request."""
        for position in self._waiting.heads(self._may_try if self._busy else None):
            yield position.key, position.rank
        if self._trying is not None:
            yield self._trying.key, self._trying.rank

    def _pace(self) -> None:
        now = self._loop.time()
        since_s = now - self._paced_from
        self.interval_s += _PACE_WEIGHT * (since_s - self.interval_s) if self.interval_s else since_s
        self._paced_from = now


class AdmissionQueue:
    """The queues of all models.

    `size` requests may wait in each. `changed` is called with how many wait for a model, and `refused` with why one may not:
    `full`, `late` (it would have its turn after its deadline), `expired` (the deadline passed in queue) or `goal` (it has waited
    too long to reach its latency goals). `waited` is called with the model, the priority and the seconds of each that leaves.
    """

    def __init__(
        self,
        size: int,
        policy: QueuePolicy = QueuePolicy.FCFS,
        changed: Callable[[str, int], None] = lambda model, waiting: None,
        refused: Callable[[str, str], None] = lambda model, reason: None,
        waited: Callable[[str, int, float], None] = lambda model, priority, waited_s: None,
    ) -> None:
        self._waited = waited
        self.fair_shares = FairShares(asyncio.get_running_loop().time)
        """The fair shares of the keys that wait here and at other frontends."""
        self._size = size
        self._policy = policy
        self.looks_at_caches = policy is QueuePolicy.PREFIX
        self._changed = changed
        self._refused = refused
        self._queues: dict[tuple[str, Role | None], _ModelQueue] = {}
        self._loop = asyncio.get_running_loop()

    def waiting(self, model: str, role: Role | None = None) -> int:
        """Return how many requests wait for the instances of a model; a new one has to queue up behind them."""
        queue = self._queues.get((model, role))
        return 0 if queue is None else len(queue)

    def waiting_requests(self) -> Mapping[Pool, WaitingRequests]:
        """Return how many requests wait for each pool that some wait for."""
        waiting: dict[Pool, WaitingRequests] = {}
        for (model, _), queue in self._queues.items():
            if len(queue):
                role, requests = queue.demand()
                waiting[Pool(model, role)] = waiting.get(Pool(model, role), WaitingRequests(0)) + requests
        return waiting

    def must_wait(self, model: str, role: Role | None, account: Account, priority: int) -> bool:
        """Return whether a new request has to queue up: behind others here, or one at another frontend is before it."""
        queue = self.fair_shares.of(model, role)
        return self.waiting(model, role) > 0 or queue.holds_back(account.name, rank_of(self._policy, priority))

    def sent_at_once(self, model: str, role: Role | None, account: Account, tokens: int) -> None:
        """A request that did not have to wait was sent to an instance."""
        self.fair_shares.of(model, role).served(account.name, max(tokens, 1) / account.weight)

    def position(
        self,
        model: str,
        role: Role | None = None,
        *,
        account: Account = ANONYMOUS,
        priority: int,
        tokens: int,
        deadline: float | None,
        missing_tokens: Callable[[], int | None] = lambda: None,
        demand: Callable[[], tuple[Role, int]] = lambda: (Role.AGGREGATED, 0),
        instance: InstanceId | None = None,
    ) -> QueuePosition:
        """Return a position, for which another request has to leave a full queue when it is entered. Raises Overloaded.

        `tokens` are those of the prompt and of the expected response; `missing_tokens`: see `queue_order`; `demand`: see
        `QueuePosition`; `instance` is the only one that may serve the request.
        """
        queue = self._queue_of(model, role)
        tokens = max(tokens, 1)
        rank, order = rank_and_order(self._policy, priority, tokens, queue.number())
        waited = partial(self._waited, model, priority)
        position = QueuePosition(queue, account, rank, order, tokens, deadline, missing_tokens, demand, instance, waited)
        if deadline is not None:
            wait_s = queue.before(position) * queue.interval_s
            left_s = deadline - self._loop.time()
            if wait_s > left_s:
                queue.refused("late")
                raise Overloaded(
                    f"requests for model '{model}' wait for about {wait_s:.1f} s now, and this one has {left_s:.1f} s left",
                    retry_after_s=wait_s,
                )
        if len(queue) >= self._size:
            wait_s = len(queue) * queue.interval_s
            full = Overloaded(f"the queue for model '{model}' is full: {len(queue)} waiting", retry_after_s=max(1.0, wait_s))
            if (displaced := queue.less_important(position)) is None:
                queue.refused("full")
                raise full
            position.displaced = displaced, full
        return position

    def poke(self, instance: InstanceId) -> None:
        """A request has ended at an instance."""
        for queue in self._queues.values():
            queue.poke(instance)

    def _queue_of(self, model: str, role: Role | None) -> _ModelQueue:
        queue = self._queues.get((model, role))
        if queue is None:
            queue = _ModelQueue(
                lambda: self._changed(model, self._all_waiting(model)),
                lambda reason: self._refused(model, reason),
                nearest_to_caches if self.looks_at_caches else None,
                self.fair_shares.of(model, role),
            )
            self._queues[model, role] = queue
        return queue

    def _all_waiting(self, model: str) -> int:
        return sum(len(queue) for (name, _), queue in self._queues.items() if name == model)
