"""Responses of models with `response_cache { enable: true }`, kept for equal requests in the memory of the worker.

Requests are equal if the model, its version, the requested outputs and the contents of all inputs are; their ids, parameters and
callers do not matter, as in Triton. The least recently used responses make room for new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dynamo.common.tensors import Array
from dynamo.worker.engine.base import RequestTimings
from dynamo.worker.repository import wire
from dynamo.worker.repository.execution import Arrays, ModelRequest

T = TypeVar("T")

_ENTRY_BYTES = 512
"""Taken to be the cost of a response beside its outputs, so that empty ones are bounded, too."""
_ELEMENT_BYTES = 64
"""The same for an element of BYTES."""
_LARGE_BYTES = 256 * 1024
"""Larger tensors are hashed and copied on another thread."""


@dataclass(frozen=True, slots=True)
class _Entry:
    outputs: Arrays
    size: int


class ResponseCache(Collector):
    """Holds up to `max_bytes`. For the event loop; a scrape from another thread reads counts only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = 0
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<ResponseCache of {self._max_bytes} bytes, used={self._used_bytes}, entries={len(self._entries)}>"

    def for_model(self) -> ModelCache:
        """Return the part of one loaded model. Close it."""
        return ModelCache(self, next(self._numbers))

    def find(self, key: bytes) -> Arrays | None:
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry.outputs

    def fits(self, size: int) -> bool:
        return size <= self._max_bytes

    def insert(self, key: bytes, outputs: Arrays, size: int) -> None:
        """Keep outputs, which nobody changes. Others make room for them."""
        self.remove(key)
        while self._used_bytes + size > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._used_bytes -= evicted.size
            self._evictions += 1
        self._entries[key] = _Entry(outputs, size)
        self._used_bytes += size

    def remove(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._used_bytes -= entry.size

    def remove_all(self, prefix: bytes) -> None:
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self.remove(key)

    def collect(self) -> Iterable[Metric]:
        counts = (
            ("nv_cache_num_entries", "Responses in the response cache.", len(self._entries)),
            ("nv_cache_util", "Used share of the response cache, 0 to 1.", self._used_bytes / self._max_bytes),
            ("nv_cache_num_hits", "Hits in the response cache.", self._hits),
            ("nv_cache_num_misses", "Misses in the response cache.", self._misses),
            ("nv_cache_num_lookups", "Lookups in the response cache.", self._hits + self._misses),
            ("nv_cache_num_evictions", "Responses that made room for others in the response cache.", self._evictions),
        )
        for name, help, value in counts:
            metric = Metric(name, help, "gauge")
            metric.add_sample(name, {}, value)
            yield metric


class ModelCache:
    """The responses of one loaded model, which do not outlive it."""

    def __init__(self, cache: ResponseCache, number: int) -> None:
        self._cache = cache
        self._prefix = number.to_bytes(8, "big")
        self._is_closed = False

    async def find(self, request: ModelRequest, outputs: Iterable[str]) -> tuple[bytes, Arrays | None]:
        """Return the key of a request for `outputs`, and its response if it is there, and count that in its timings."""
        start = time.perf_counter_ns()
        wanted = sorted(set(outputs))
        size = sum(array.nbytes for array in request.inputs.values())
        key = self._prefix + await _beside(size, lambda: _digest(request, wanted))
        found = self._cache.find(key)
        _count(request.context.timings, start, is_hit=found is not None)
        return key, found

    async def insert(self, key: bytes, outputs: Arrays, timings: RequestTimings) -> None:
        """Keep a copy of outputs, whose memory may be used for other things later."""
        start = time.perf_counter_ns()
        size = _ENTRY_BYTES + sum(map(_size, outputs.values()))
        if self._cache.fits(size):
            kept = await _beside(size, lambda: {name: _copied(array) for name, array in outputs.items()})
            if not self._is_closed:
                self._cache.insert(key, kept, size)
        _count(timings, start, is_hit=False)

    def close(self) -> None:
        self._is_closed = True
        self._cache.remove_all(self._prefix)


def _digest(request: ModelRequest, wanted: Sequence[str]) -> bytes:
    digest = hashlib.blake2b(repr((request.context.version, wanted)).encode(), digest_size=32)
    for name in sorted(request.inputs):
        head, raw = wire.pack(name, request.inputs[name])
        digest.update(repr((name, head.datatype, head.shape, head.size)).encode())
        digest.update(raw)
    return digest.digest()


def _size(array: Array) -> int:
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(len(element) for element in array.reshape(-1)) + _ELEMENT_BYTES * array.size


def _copied(array: Array) -> Array:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def _count(timings: RequestTimings, start_ns: int, *, is_hit: bool) -> None:
    taken_ns = max(1, time.perf_counter_ns() - start_ns)
    if is_hit:
        timings.cache_hit_ns += taken_ns
    else:
        timings.cache_miss_ns += taken_ns


async def _beside(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _LARGE_BYTES else work()
