"""The instances that a request can be sent to now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, InstanceGone, Unavailable
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.serving.call import Call, Instances, Work


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


class Candidates:
    """The directory's instances, without those that refuse requests or fail canaries where a model has others."""

    def __init__(self, directory: Instances, refusal_pause_s: float, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._refusal_pause_s = refusal_pause_s
        self._clock = clock
        self._able: dict[tuple[str, str, str, Role | None], tuple[Sequence[Instance], tuple[Instance, ...]]] = {}
        self._left_out: dict[InstanceId, float] = {}
        """Until when."""

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

    def select(self, work: Work, call: Call, failed: Sequence[InstanceId] = ()) -> Sequence[Instance]:
        """Return the instances that a request may be sent to, without those in `failed`."""
        able = self.able_to_serve(work.name or work.model, work.version, work.tokenizer, work.role)
        if call.instance is not None:
            return [instance for instance in able if instance.id == call.instance]
        if failed:
            able = tuple(instance for instance in able if instance.id not in failed)
        if self._left_out:
            now = self._clock()
            self._left_out = {instance: until for instance, until in self._left_out.items() if until > now}
            return tuple(instance for instance in able if instance.id not in self._left_out) or able
        return able

    def leave_out(self, instance: InstanceId) -> None:
        """Send the instance no requests until `take_back`, unless there is no other."""
        self._left_out[instance] = math.inf

    def take_back(self, instance: InstanceId) -> None:
        """End `leave_out`."""
        self._left_out.pop(instance, None)

    def removed(self, instance: InstanceId) -> None:
        """An instance deregistered."""
        self._left_out.pop(instance, None)

    def failed(self, instance: InstanceId, error: DynamoError) -> None:
        """Draw the conclusion for other requests from `error`, with which an instance failed one."""
        if not (error.retryable and isinstance(error, Unavailable)):
            return
        if not isinstance(error, InstanceGone):
            until = self._clock() + self._refusal_pause_s
            self._left_out[instance] = max(until, self._left_out.get(instance, 0.0))
        elif not error.is_alive:
            self._directory.mark_down(instance)
