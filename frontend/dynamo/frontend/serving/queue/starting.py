"""Requests that wait while the first instance of their model starts.

A model that can be started (`common.scaling.standby`) takes requests without instances. They wait in the order in which they
came, each for `timeout_s` at most, and all try again as soon as the instances of the model change: nothing is polled. If `size`
requests wait for the model, a new one is refused, or in its place the last one of the API key that has the most, if that has more
than the new one's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dynamo.common.discovery import Instance
from dynamo.common.errors import DeadlineExceeded, ModelStarting
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import StartOptions
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.router.demand import WaitingRequests

_OTHER_ROLES = {Role.DECODE: Role.PREFILL, Role.PREFILL: Role.DECODE}
LEAVING_S = 2.0
"""An instance that refuses requests because it ends has deregistered before: frontends know it within so long."""
_WOKEN_PER_TURN = 16
"""To be sent to an instance takes each a fraction of a millisecond."""
_RETRY_S = 5.0
"""When a refused client may try again, as long as no start has been seen."""


class StandbyModels(Protocol):
    """The part of `fleet.standby.StandbyView` that serving needs."""

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model, by its name, an alias or an adapter; None if it cannot be started."""
        ...

    def cards(self) -> Mapping[str, ModelCard]:
        """Return the cards of the models that can be started, by name."""
        ...

    def start_s(self, pool: Pool) -> float | None:
        """Return how long the last start of an instance took, 0 if none has been seen; None if the pool cannot be started."""
        ...

    def on_change(self, callback: Callable[[Sequence[ModelCard], Sequence[ModelCard]], None]) -> None:
        """Call `callback(added, removed)`, synchronously, with the cards of records; one that has changed is in both."""
        ...


class NoStandby:
    """No model can be started."""

    def card(self, name: str) -> None:
        return None

    def cards(self) -> Mapping[str, ModelCard]:
        return {}

    def start_s(self, pool: Pool) -> None:
        return None

    def on_change(self, callback: Callable[[Sequence[ModelCard], Sequence[ModelCard]], None]) -> None:
        """There are no changes."""


class _StartWaiter:
    """One request that waits."""

    __slots__ = ("owner", "pool", "tokens", "woken")

    def __init__(self, pool: Pool, owner: str, tokens: int) -> None:
        self.pool = pool
        self.owner = owner
        self.tokens = tokens
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Starting:
    """The requests that wait for one model, the earliest first."""

    def __init__(self, instances: Sequence[Instance], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.instances = instances
        """The instances of the model when requests were last woken."""
        self.waiters: dict[_StartWaiter, None] = {}
        self.of_owners: Counter[str] = Counter()

    def add(self, waiter: _StartWaiter) -> None:
        self.waiters[waiter] = None
        self.of_owners[waiter.owner] += 1

    def remove(self, waiter: _StartWaiter) -> None:
        if waiter in self.waiters:
            del self.waiters[waiter]
            self.of_owners[waiter.owner] -= 1
            if not self.of_owners[waiter.owner]:
                del self.of_owners[waiter.owner]

    def displaced_by(self, owner: str) -> _StartWaiter | None:
        """Return the request that leaves for a new one of `owner`; None: the new one may not wait."""
        [(largest, count)] = self.of_owners.most_common(1)
        if count <= self.of_owners[owner] + 1:
            return None
        return next(waiter for waiter in reversed(self.waiters) if waiter.owner == largest)

    def wake(self) -> None:
        """Let all try again, in the order in which they came; a turn of the event loop for each few."""
        self._wake_next([waiter for waiter in self.waiters if not waiter.woken.done()][::-1])

    def _wake_next(self, asleep: list[_StartWaiter]) -> None:
        """Wake the last ones of `asleep`."""
        for _ in range(min(_WOKEN_PER_TURN, len(asleep))):
            waiter = asleep.pop()
            if not waiter.woken.done():
                waiter.woken.set_result(None)
        if asleep:
            self._loop.call_soon(self._wake_next, asleep)


class StartQueue:
    """The requests that wait for models to start. One per process."""

    def __init__(
        self,
        directory: Directory,
        standby: StandbyModels,
        options: StartOptions,
        refused: Callable[[str, str], None] = lambda model, reason: None,
    ) -> None:
        """`refused` is called with the model and why a request may not wait (longer): `start_full` or `start_timeout`."""
        self.timeout_s = options.timeout_s
        self._directory = directory
        self._standby = standby
        self._size = options.queue_size
        self._refused = refused
        self._models: dict[str, _Starting] = {}
        standby.on_change(lambda added, removed: self._wake_all())

    def pool(self, name: str, model: str, role: Role | None) -> Pool | None:
        """Return the pool whose instances do work for a model, or an adapter of it, once they start; None: they cannot start."""
        if role is not None:
            pool = Pool(model, role)
            return None if self._standby.start_s(pool) is None else pool
        named = self.pool_named(name)
        return named if named is not None and named.model == model else None

    def pool_named(self, name: str) -> Pool | None:
        """Return the pool of the model that has a name, an alias or an adapter; None: it cannot be started."""
        card = self._standby.card(name)
        return None if card is None else Pool.of(card)

    def waiting_requests(self) -> Mapping[Pool, WaitingRequests]:
        """Return how many requests wait for each pool that some wait for.

        Where prompts are computed apart, they wait for instances of both roles, as far as there are none.
        """
        waiting: dict[Pool, WaitingRequests] = {}
        for starting in self._models.values():
            for waiter in starting.waiters:
                waiting[waiter.pool] = waiting.get(waiter.pool, WaitingRequests(0)) + WaitingRequests(1, waiter.tokens)
        for pool, requests in list(waiting.items()):
            other = Pool(pool.model, _OTHER_ROLES.get(pool.role, pool.role))
            if other not in waiting and self._standby.start_s(other) is not None and not self._has_instances(other):
                waiting[other] = requests
        return waiting

    def _has_instances(self, pool: Pool) -> bool:
        return any(instance.card.role is pool.role for instance in self._directory.instances(pool.model))

    def check_room(self, pool: Pool, owner: str) -> None:
        """Raise ModelStarting if a request of an API key may not wait."""
        starting = self._models.get(pool.model)
        if starting is not None and len(starting.waiters) >= self._size and starting.displaced_by(owner) is None:
            raise self._full(pool, len(starting.waiters))

    async def wait(self, pool: Pool, owner: str, tokens: int, until: float, deadline: float | None) -> None:
        """Return when the instances of the model have changed, or the models that can be started have.

        Raises ModelStarting at `until`, or if too many requests wait already, and DeadlineExceeded.
        """
        try:
            await self._changed(pool, owner, tokens, until, deadline)
        except TimeoutError:
            self._refused(pool.model, "start_timeout")
            raise self._starting(pool, f"no instance serves it after {self.timeout_s:g} s") from None

    async def wait_for_end(self, pool: Pool, owner: str, tokens: int, until: float, deadline: float | None) -> None:
        """Do as `wait` does, but return at `until`, too: an instance that is there may be about to leave."""
        with contextlib.suppress(TimeoutError):
            await self._changed(pool, owner, tokens, until, deadline)

    async def _changed(self, pool: Pool, owner: str, tokens: int, until: float, deadline: float | None) -> None:
        """Raises TimeoutError at `until`."""
        if not self._size:
            raise self._full(pool, 0)
        starting = self._models.get(pool.model)
        if starting is None:
            starting = self._models[pool.model] = _Starting(self._directory.instances(pool.model), asyncio.get_running_loop())
        elif len(starting.waiters) >= self._size:
            self._displace(starting, pool, owner)
        waiter = _StartWaiter(pool, owner, tokens)
        starting.add(waiter)
        try:
            async with asyncio.timeout_at(until if deadline is None else min(until, deadline)):
                await waiter.woken
        except TimeoutError:
            if deadline is not None and deadline <= until:
                raise DeadlineExceeded() from None
            raise
        finally:
            starting.remove(waiter)
            if not starting.waiters:
                self._models.pop(pool.model, None)

    def changed(self) -> None:
        """Let requests try again whose models' instances have changed."""
        for model, starting in self._models.items():
            instances = self._directory.instances(model)
            if instances is not starting.instances:
                starting.instances = instances
                starting.wake()

    def _wake_all(self) -> None:
        for starting in self._models.values():
            starting.wake()

    def _displace(self, starting: _Starting, pool: Pool, owner: str) -> None:
        """Make room for a request of an API key. Raises ModelStarting."""
        self._refused(pool.model, "start_full")
        error, displaced = self._full(pool, len(starting.waiters)), starting.displaced_by(owner)
        if displaced is None:
            raise error
        starting.remove(displaced)
        if not displaced.woken.done():
            displaced.woken.set_exception(error)

    def _full(self, pool: Pool, waiting: int) -> ModelStarting:
        return self._starting(pool, f"{waiting} requests wait for its first instance, and no more may")

    def _starting(self, pool: Pool, why: str) -> ModelStarting:
        return ModelStarting(pool.model, why, retry_after_s=max(1.0, self._standby.start_s(pool) or _RETRY_S))
