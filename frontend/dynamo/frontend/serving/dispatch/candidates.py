"""The instances that a request can be sent to now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, InstanceGone, Unavailable
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.serving.call import Work
from dynamo.frontend.serving.dispatch.circuits import Circuits


def able_to_serve(
    instances: Sequence[Instance], version: str = "", tokenizer: str = "", role: Role | None = None
) -> tuple[Instance, ...]:
    """Return the instances that a request can be sent to: of this role, or all that respond to requests."""
    return tuple(
        instance
        for instance in instances
        if (not version or version in instance.card.versions)
        and (not tokenizer or (instance.card.llm is not None and instance.card.llm.tokenizer == tokenizer))
        and (instance.card.role is role if role is not None else instance.card.role is not Role.PREFILL)
    )


_Selection: TypeAlias = tuple[str, str, str, Role | None]
"""Name, version, tokenizer and role, as a request needs them."""


class Candidates:
    """The directory's instances, without those that refuse requests, fail canaries or have open circuits, if there are others."""

    def __init__(self, directory: Directory, circuits: Circuits, refusal_pause_s: float, clock: Callable[[], float]) -> None:
        self._circuits = circuits
        self._circuits_version = 0
        """The state of the circuits that `_reduced` was made of."""
        self._directory = directory
        self._refusal_pause_s = refusal_pause_s
        self._clock = clock
        self._able: dict[_Selection, tuple[Sequence[Instance], tuple[Instance, ...]]] = {}
        self._left_out: dict[InstanceId, float] = {}
        """Until when."""
        self._next_return_at = math.inf
        """The first of these times."""
        self._reduced: dict[_Selection, tuple[tuple[Instance, ...], tuple[Instance, ...]]] = {}
        """The instances that are able to serve, and those of them not left out; cleared when other instances are left out."""

    def able_to_serve(self, name: str, version: str = "", tokenizer: str = "", role: Role | None = None) -> tuple[Instance, ...]:
        """Return the instances of a model, alias or adapter that can serve it; the same tuple until they change."""
        instances = self._directory.instances(name)
        key = (name, version, tokenizer, role)
        cached = self._able.get(key)
        if cached is not None and cached[0] is instances:
            return cached[1]
        able = able_to_serve(instances, version, tokenizer, role)
        if isinstance(instances, tuple) and instances:  # a tuple cannot change under us, so being the same one says enough
            self._able[key] = (instances, able)
        else:
            self._able.pop(key, None)
        return able

    def select(self, work: Work, failed: Sequence[InstanceId] = ()) -> Sequence[Instance]:
        """Return the instances that a request may be sent to, without those in `failed`."""
        able = self.able_to_serve(work.name or work.model, work.version, work.tokenizer, work.role)
        if work.carried is not None:
            able = work.carried.reached_of(able)
        if work.pinned is not None:
            return [instance for instance in able if instance.id == work.pinned]
        if self._circuits.are_open:
            self._follow_circuits()
        elif not self._left_out:
            return tuple(instance for instance in able if instance.id not in failed) if failed else able
        if self._left_out and self._clock() >= self._next_return_at:
            self._end_expired()
        if failed:
            return self._reduce(tuple(instance for instance in able if instance.id not in failed))
        key = (work.name or work.model, work.version, work.tokenizer, work.role)
        cached = self._reduced.get(key)
        if cached is None or cached[0] is not able:
            cached = self._reduced[key] = (able, self._reduce(able))
        return cached[1]

    def are_others(self, work: Work) -> bool:
        """Return whether there are instances in the role that work is for, and none of them is able to do it."""
        name = work.name or work.model
        if self.able_to_serve(name, work.version, work.tokenizer, work.role):
            return False
        return bool(able_to_serve(self._directory.instances(work.model), role=work.role))

    def leave_out(self, instance: InstanceId) -> None:
        """Send the instance no requests until `take_back`, unless there is no other."""
        self._leave_out_until(instance, math.inf)

    def take_back(self, instance: InstanceId) -> None:
        """End `leave_out`."""
        if self._left_out.pop(instance, None) is not None:
            self._reduced.clear()

    def removed(self, instance: InstanceId) -> None:
        """An instance deregistered."""
        self.take_back(instance)

    def failed(self, instance: InstanceId, error: DynamoError) -> None:
        """Draw the conclusion for other requests from `error`, with which an instance failed one."""
        if not (error.retryable and isinstance(error, Unavailable)):
            return
        if not isinstance(error, InstanceGone):
            self._leave_out_until(instance, self._clock() + self._refusal_pause_s)
        elif not error.is_alive:
            self._directory.mark_down(instance)

    def _leave_out_until(self, instance: InstanceId, until: float) -> None:
        if instance not in self._left_out:
            self._reduced.clear()
        self._left_out[instance] = max(until, self._left_out.get(instance, 0.0))
        self._next_return_at = min(self._next_return_at, until)

    def _follow_circuits(self) -> None:
        self._circuits.advance()
        if self._circuits_version != self._circuits.version:
            self._circuits_version = self._circuits.version
            self._reduced.clear()

    def _end_expired(self) -> None:
        now = self._clock()
        self._left_out = {instance: until for instance, until in self._left_out.items() if until > now}
        self._next_return_at = min(self._left_out.values(), default=math.inf)
        self._reduced.clear()

    def _reduce(self, able: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return the instances that are not left out and whose circuits admit requests, or all if there would be none."""
        kept = tuple(instance for instance in able if instance.id not in self._left_out)
        return tuple(filter(self._circuits.admits, kept)) or kept or able
