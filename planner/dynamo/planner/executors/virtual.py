"""Decisions as the keys in etcd that NVIDIA Dynamo's virtual connector has, for programs that were written for it.

    v1/{namespace}/planner/num_prefill_workers    2
    v1/{namespace}/planner/num_decode_workers     4
    v1/{namespace}/planner/decision_id            7     of the planner: counts decisions, from 0
    v1/{namespace}/planner/scaled_decision_id     6     of the program: the last decision that it has carried out

The numbers are decimal text. All that the planner writes is written at once, so that a program that reads after a change has seen
has the whole decision. While the last decision is not acknowledged there is no other one, for at most half an hour. As there, a
pool that the planner has no decision for is not written: an aggregated model has `num_decode_workers` only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dynamo.common.etcd import Etcd
from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.base import ExecutorFailed, platform_failures
from dynamo.planner.pools import Decision

log = logging.getLogger(__name__)

PREFILL, DECODE, DECISION, SCALED = "num_prefill_workers", "num_decode_workers", "decision_id", "scaled_decision_id"
_NUMBER_OF = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.AGGREGATED: DECODE}


@dataclass(frozen=True, slots=True)
class _VirtualState:
    """What the keys hold."""

    numbers: Mapping[str, int]
    """By the name of the key, without those that are missing or no number."""
    decision_revision: int
    """At which the number of the decision was changed last; 0: there is none."""

    @property
    def is_acknowledged(self) -> bool:
        """Whether the last decision has been carried out, or there was none."""
        decision = self.numbers.get(DECISION)
        return decision is None or self.numbers.get(SCALED, -1) >= decision


class VirtualExecutor:
    """Writes the numbers of one model."""

    def __init__(
        self, etcd: Etcd, namespace: str, *, model: str | None, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`model` None: the only one of which decisions come. `wait_s`: how long an acknowledgement is waited for."""
        self._etcd = etcd
        self._prefix = f"v1/{namespace}/planner/"
        self._model = model
        self._wait_s = wait_s
        self._clock = clock
        self._held_since: float | None = None
        """When a decision was held back first because the one before is not acknowledged."""

    async def carry_out(self, decisions: Sequence[Decision]) -> None:
        wanted = self._numbers(decisions)
        with platform_failures("the keys of the virtual connector cannot be written"):
            state = await self._read()
            if all(state.numbers.get(name) == number for name, number in wanted.items()):
                return
            if self._is_held(state):
                return
            decision = state.numbers.get(DECISION, -1) + 1
            values = {**wanted, DECISION: decision}
            texts = {self._prefix + name: str(number).encode() for name, number in values.items()}
            key = self._prefix + DECISION
            if not await self._etcd.replace_together(texts, key=key, mod_revision=state.decision_revision):
                raise ExecutorFailed("another planner has made a decision for the virtual connector at the same time")
        self._held_since = None
        log.info("virtual connector: decision %d, %s", decision, wanted)

    async def current(self, pools: Collection[Pool]) -> Mapping[Pool, int]:
        with platform_failures("the keys of the virtual connector cannot be read"):
            numbers = (await self._read()).numbers
        own = [pool for pool in pools if self._model in (None, pool.model)]
        if len({pool.model for pool in own}) > 1:
            return {}
        return {pool: numbers[name] for pool in own if (name := _NUMBER_OF[pool.role]) in numbers}

    async def close(self) -> None:
        """Leave the keys as they are: a planner that ends changes nothing."""

    def _is_held(self, state: _VirtualState) -> bool:
        """Return whether a new decision has to wait, since the last one is not acknowledged and is not old enough."""
        if state.is_acknowledged:
            return False
        now = self._clock()
        if self._held_since is None:
            self._held_since = now
            log.info("virtual connector: decision %d is not acknowledged; the next one waits", state.numbers[DECISION])
        if now - self._held_since < self._wait_s:
            return True
        log.warning("virtual connector: decision %d was not acknowledged within %g s", state.numbers[DECISION], self._wait_s)
        return False

    def _numbers(self, decisions: Sequence[Decision]) -> dict[str, int]:
        """Return the numbers to write, by the name of the key. Raises ExecutorFailed if the keys cannot hold them."""
        own = [decision for decision in decisions if self._model in (None, decision.pool.model)]
        if len(models := sorted({decision.pool.model for decision in own})) > 1:
            names = ", ".join(models)
            raise ExecutorFailed(f"the keys of the virtual connector hold one model: --virtual-model has to name one of {names}")
        numbers: dict[str, int] = {}
        for decision in own:
            name = _NUMBER_OF[decision.pool.role]
            if name in numbers:
                raise ExecutorFailed(f"'{decision.pool.model}' has aggregated and decode instances, for which there is one key")
            numbers[name] = decision.instances
        return numbers

    async def _read(self) -> _VirtualState:
        listing = await self._etcd.range(self._prefix, prefix=True)
        numbers: dict[str, int] = {}
        revision = 0
        for kv in listing.kvs:
            name = kv.key.removeprefix(self._prefix)
            if name == DECISION:
                revision = kv.mod_revision
            if (number := _parse(kv.value)) is not None:
                numbers[name] = number
            elif name in (PREFILL, DECODE, DECISION, SCALED):
                log.error("virtual connector: %s holds no number, but %r", kv.key, kv.value[:40])
        return _VirtualState(numbers, revision)


def _parse(value: bytes) -> int | None:
    """Return the number that a key holds; None for what is none. As there, -1 stands for none."""
    text = value[:20].decode("ascii", "replace")
    return int(text) if text.isdecimal() and text.isascii() else None
