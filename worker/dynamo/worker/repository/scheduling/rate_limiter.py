"""Resources that the models of a worker share, as in Triton's rate limiter.

Each group of instances may declare resources, of its device or global, that an execution holds while it runs. An execution waits
for an instance of its model that is idle, and for the resources of that instance. The instance with the least executions,
weighted by its priority, is served first, of equal ones the execution that waits longest; others wait until it is, so that those
which need much get their turn.

An execution holds its resources until the model has returned, also if its caller leaves before. As in Triton, two models that
need the same last resource wait for each other for ever if one calls the other; here until the caller of the first one leaves.

Which process of a model runs an execution does not depend on the instance whose resources it holds: only their numbers agree.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from typing import TypeAlias

from dynamo.common.errors import InvalidRequest
from dynamo.worker.repository.declared.model_config import ModelInstance

_PROVIDED = re.compile(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}|global))?")

ResourceKey: TypeAlias = tuple[str, int | None]
"""Name and device of a resource; None: it is global."""


class RateLimit(StrEnum):
    OFF = "off"
    """Resources are not looked at."""
    EXECUTION_COUNT = "execution_count"


@dataclass(frozen=True, slots=True)
class ProvidedResource:
    """So much of a resource on one device; with neither device nor `is_global` on each of them."""

    name: str
    count: int
    device: int | None = None
    is_global: bool = False

    @classmethod
    def parse(cls, text: str) -> ProvidedResource:
        """Read `NAME:COUNT` or `NAME:COUNT:DEVICE`, where the device is a number or `global`. Raises ValueError."""
        parts = _PROVIDED.fullmatch(text)
        if parts is None:
            raise ValueError(f"must be NAME:COUNT or NAME:COUNT:DEVICE with a device number or 'global', got {text!r}")
        name, count, device = parts.groups()
        is_global = device == "global"
        return cls(name, int(count), None if device is None or is_global else int(device), is_global)

    def serves(self, key: ResourceKey) -> bool:
        """As in Triton, a global need takes the largest count of any device, that of a device no global one."""
        name, device = key
        return name == self.name and (device is None or (not self.is_global and self.device in (None, device)))


class _LimitedInstance:
    """One instance of a model, and what an execution of it holds."""

    __slots__ = ("executions", "is_idle", "needs", "priority")

    def __init__(self, instance: ModelInstance) -> None:
        self.needs: Mapping[ResourceKey, int] = {
            (resource.name, None if getattr(resource, "global") else instance.device): resource.count
            for resource in instance.rate_limiter.resources
        }
        self.priority = max(1, instance.rate_limiter.priority)
        self.executions = 0
        self.is_idle = True

    @property
    def rank(self) -> int:
        """The instance with the smallest is served first."""
        return self.executions * self.priority


class ExecutionLimits:
    """What the executions of one loaded model wait for; nothing, if the worker has no rate limiter."""

    async def take(self) -> Callable[[], None]:
        """Wait for an instance and its resources. Return what gives them back, which is to be called once."""
        return lambda: None

    @property
    def waiting(self) -> int:
        """Executions that wait for an instance or its resources."""
        return 0

    def close(self) -> None:
        """Forget the model, which runs no more. Executions that wait are cancelled."""


class RateLimiter:
    """The resources of one worker, and the models that use them."""

    def __init__(self, provided: Sequence[ProvidedResource] = ()) -> None:
        """Without `provided` there is as much of each resource as the instance needs that needs most of it."""
        self._provided = provided
        self._models: dict[_ModelLimits, None] = {}
        self._held: dict[ResourceKey, int] = {}
        self.numbers = count()

    def add(self, instances: Iterable[ModelInstance]) -> ExecutionLimits:
        """Let a model use resources. Raises InvalidRequest if one of its instances could never run."""
        model = _ModelLimits(self, [_LimitedInstance(instance) for instance in instances])
        self._models[model] = None
        try:
            self._check(model)
        except InvalidRequest:
            self.remove(model)
            raise
        return model

    def remove(self, model: _ModelLimits) -> None:
        self._models.pop(model, None)

    def _check(self, model: _ModelLimits) -> None:
        for instance in model.instances:
            for (name, device), needed in instance.needs.items():
                total = self._total((name, device))
                if total < needed:
                    raise InvalidRequest(
                        f'instance_group.rate_limiter: Resource count for "{name}" is limited to {total} which will prevent '
                        f"scheduling of one or more model instances, the minimum required count is {needed}"
                    )
        keys = {key for other in self._models for instance in other.instances for key in instance.needs}
        for name, device in sorted(keys, key=str):
            if device is not None and (name, None) in keys:
                raise InvalidRequest(
                    f'instance_group.rate_limiter: Resource "{name}" is present as both global and device-specific resource in '
                    "the model configuration."
                )

    def _total(self, key: ResourceKey) -> int:
        if self._provided:
            return max((resource.count for resource in self._provided if resource.serves(key)), default=0)
        return max(instance.needs.get(key, 0) for model in self._models for instance in model.instances)

    def advance(self) -> None:
        """Give instances to executions that wait, as far as resources go."""
        while True:
            candidates = [candidate for model in self._models if (candidate := model.candidate()) is not None]
            if not candidates:
                return
            _, _, instance, model = min(candidates, key=lambda candidate: candidate[:2])
            if any(self._held.get(key, 0) + needed > self._total(key) for key, needed in instance.needs.items()):
                return
            for key, needed in instance.needs.items():
                self._held[key] = self._held.get(key, 0) + needed
            instance.is_idle = False
            model.give(instance)

    def release(self, instance: _LimitedInstance) -> None:
        for key, held in instance.needs.items():
            self._held[key] -= held
        instance.executions += 1
        instance.is_idle = True
        self.advance()


class _ModelLimits(ExecutionLimits):
    """The instances of one loaded model, and the executions that wait for one."""

    def __init__(self, limiter: RateLimiter, instances: Sequence[_LimitedInstance]) -> None:
        self.instances = instances
        self._limiter = limiter
        self._turns: dict[asyncio.Future[_LimitedInstance], int] = {}
        """Executions that wait, in order, numbered over all models."""

    async def take(self) -> Callable[[], None]:
        return partial(self._limiter.release, await self._turn())

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def close(self) -> None:
        self._limiter.remove(self)
        for turn in self._turns:
            turn.cancel()

    async def _turn(self) -> _LimitedInstance:
        turn: asyncio.Future[_LimitedInstance] = asyncio.get_running_loop().create_future()
        self._turns[turn] = next(self._limiter.numbers)
        self._limiter.advance()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                del self._turns[turn]
                self._limiter.advance()  # others may have waited behind it
            else:  # an instance came in the very turn of the event loop in which the caller left
                self._limiter.release(turn.result())
            raise

    def candidate(self) -> tuple[int, int, _LimitedInstance, _ModelLimits] | None:
        """Return an idle instance and the turn that is for it: rank, number, instance, model. None: one is missing."""
        number = next((number for turn, number in self._turns.items() if not turn.done()), None)
        idle = (instance for instance in self.instances if instance.is_idle)
        best = min(idle, key=lambda instance: instance.rank, default=None)
        return None if number is None or best is None else (best.rank, number, best, self)

    def give(self, instance: _LimitedInstance) -> None:
        turn = next(turn for turn in self._turns if not turn.done())
        del self._turns[turn]
        turn.set_result(instance)


def limits_of(limiter: RateLimiter | None, instances: Iterable[ModelInstance]) -> ExecutionLimits:
    """Return the limits of a model, or of some of its instances. Raises InvalidRequest if one of them could never run."""
    return ExecutionLimits() if limiter is None else limiter.add(instances)
