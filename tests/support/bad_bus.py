"""Workers that publish their KV caches over a bus that loses, repeats, delays and reorders, until `be_good` is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.worker.engine.base import EngineLoad

Publish = Callable[[str, bytes, str], bool]


class Index(Protocol):
    def held(self, instance: InstanceId, tier: Tier) -> set[int]: ...


@dataclass
class BadBus:
    """A worker's end of a bus: what is published goes on to `publish`, or not, or twice, or later."""

    publish: Publish
    rng: Random
    lost: float = 0.2
    repeated: float = 0.1
    delayed: float = 0.2
    longest_delay_s: float = 0.3
    is_connected: bool = True
    max_payload: int = 1 << 20
    reconnected_at: float = float("-inf")

    def be_good(self) -> None:
        self.lost = self.repeated = self.delayed = 0.0

    def publish_soon(self, subject: str, payload: bytes, reply: str = "") -> bool:
        if self.rng.random() < self.lost:
            return True
        for _ in range(2 if self.rng.random() < self.repeated else 1):
            if self.rng.random() < self.delayed:
                loop, delay_s = asyncio.get_running_loop(), self.rng.random() * self.longest_delay_s
                loop.call_later(delay_s, self.publish, subject, payload, reply)
            else:
                self.publish(subject, payload, reply)
        return True


class CachingEngine:
    """An engine that does nothing but cache blocks, at random."""

    def __init__(self, rng: Random, log_bytes: int) -> None:
        self.kv = KvState(log_bytes)
        self._rng = rng
        self._callbacks: list[Callable[[], None]] = []

    def held(self, tier: Tier = Tier.GPU) -> set[int]:
        return set(self.kv.held(tier))

    def is_mirrored(self, index: Index, instance: InstanceId) -> bool:
        """Whether an index has exactly the blocks of this engine, on every tier."""
        return all(index.held(instance, tier) == self.held(tier) for tier in Tier)

    def on_step(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def load(self) -> EngineLoad:
        return EngineLoad()

    def step(self, blocks: int = 40) -> None:
        """Blocks come and go, out of some few, and some are copied to slower tiers."""
        rng = self._rng
        self.kv.store(_hash(rng.randrange(blocks)) for _ in range(rng.randrange(6)))
        self.kv.remove(_hash(rng.randrange(blocks)) for _ in range(rng.randrange(6)))
        if rng.random() < 0.3:
            tier = rng.choice([Tier.CPU, Tier.SHARED])
            self.kv.store((_hash(rng.randrange(blocks)) for _ in range(rng.randrange(4))), tier=tier)
            self.kv.remove((_hash(rng.randrange(blocks)) for _ in range(rng.randrange(4))), tier=tier)
        if rng.random() < 0.03:
            self.kv.clear(tier=rng.choice([None, Tier.GPU, Tier.CPU]))
        for callback in self._callbacks:
            callback()


def _hash(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 % 2**64
