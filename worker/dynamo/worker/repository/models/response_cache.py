"""Responses of models with `response_cache { enable: true }`, kept for equal requests in the memory of the worker.

Requests are equal if the model, its version and the contents of all inputs are; their ids, parameters and callers do not matter,
as in Triton. A response has the outputs of all such requests that were computed, and serves requests for some of them. The least
recently used responses make room for new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dynamo.common.tensors.tensors import Array
from dynamo.worker.engine.base import Context
from dynamo.worker.observability.triton_metrics import version_labels
from dynamo.worker.repository.declared.execution import Arrays, ModelRequest
from dynamo.worker.repository.wire import wire

T = TypeVar("T")

_ENTRY_BYTES = 512
"""Taken to be the cost of a response beside its outputs, so that empty ones are bounded, too."""
_ELEMENT_BYTES = 64
"""The same for an element of BYTES."""
_LARGE_BYTES = 256 * 1024
"""Larger tensors are hashed and copied on another thread."""


@dataclass(frozen=True, slots=True)
class _CachedResponse:
    outputs: Arrays
    size: int


class ResponseCache(Collector):
    """Holds up to `max_bytes`. For the event loop; a scrape from another thread reads counts only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _CachedResponse] = OrderedDict()
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = 0
        self._numbers = itertools.count(1)
        self._models: dict[int, ModelCache] = {}
        """Caches of models that are not closed, by number."""

    def __repr__(self) -> str:
        return f"<ResponseCache of {self._max_bytes} bytes, used={self._used_bytes}, entries={len(self._entries)}>"

    def for_model(self, name: str, tags: Mapping[str, str] | None = None) -> ModelCache:
        """Return the part of one loaded model. Close it. `tags`: become labels of its metrics."""
        number = next(self._numbers)
        model = self._models[number] = ModelCache(self, name, number, tags)
        return model

    def find(self, key: bytes, wanted: Iterable[str]) -> Arrays | None:
        """Return the outputs that are wanted, in this order; None unless all of them are there."""
        entry = self._entries.get(key)
        if entry is None or any(name not in entry.outputs for name in wanted):
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return {name: entry.outputs[name] for name in wanted}

    def fits(self, size: int) -> bool:
        return size <= self._max_bytes

    def insert(self, key: bytes, outputs: Arrays, size: int) -> None:
        """Keep outputs, which are not changed, beside others of the same request. Other responses make room for them."""
        if (former := self._entries.get(key)) is not None:
            added = {name: array for name, array in former.outputs.items() if name not in outputs}
            size += sum(map(size_of, added.values()))
            outputs = {**added, **outputs}
        self.remove(key)
        if not self.fits(size):
            return
        while self._used_bytes + size > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._used_bytes -= evicted.size
            self._evictions += 1
        self._entries[key] = _CachedResponse(outputs, size)
        self._used_bytes += size

    def remove(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._used_bytes -= entry.size

    def drop(self, number: int, prefix: bytes) -> None:
        """Forget a model, and the responses whose keys begin with `prefix`."""
        self._models.pop(number, None)
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
        yield from self._collect_models()

    def _collect_models(self) -> Iterable[Metric]:
        """Yield what each model has counted since it was loaded; a former self of it may still be open."""
        lookups: dict[tuple[tuple[str, str], ...], Lookups] = {}
        for model in list(self._models.values()):
            for version, counted in list(model.lookups.items()):
                labels = tuple(version_labels(model.name, version, model.tags).items())
                lookups[labels] = lookups.get(labels, Lookups()).plus(counted)
        shown: tuple[tuple[str, str, Callable[[Lookups], int]], ...] = (
            ("nv_cache_num_hits_per_model", "Cache hits of a model.", lambda counts: counts.hits),
            ("nv_cache_num_misses_per_model", "Cache misses of a model.", lambda counts: counts.misses),
            ("nv_cache_hit_duration_per_model", "Microseconds of cache hits of a model.", lambda counts: counts.hit_ns // 1000),
            ("nv_cache_miss_duration_per_model", "Microseconds of cache misses.", lambda counts: counts.miss_ns // 1000),
        )
        for name, help, read in shown:
            metric = Metric(name, help, "unknown")  # a counter would have to end with _total
            for labels in sorted(lookups):
                metric.add_sample(name, dict(labels), read(lookups[labels]))
            yield metric


@dataclass(slots=True)
class Lookups:
    """How often responses of one version of a model were found and not found, and the time that this took."""

    hits: int = 0
    misses: int = 0
    hit_ns: int = 0
    miss_ns: int = 0

    def plus(self, other: Lookups) -> Lookups:
        return Lookups(
            self.hits + other.hits, self.misses + other.misses, self.hit_ns + other.hit_ns, self.miss_ns + other.miss_ns
        )


class ModelCache:
    """The responses of one loaded model, which do not outlive it."""

    def __init__(self, cache: ResponseCache, name: str, number: int, tags: Mapping[str, str] | None) -> None:
        self.name = name
        self.tags = tags
        self.lookups: dict[str, Lookups] = {}
        """By version."""
        self._cache = cache
        self._number = number
        self._prefix = number.to_bytes(8, "big")
        self._is_closed = False

    async def find(self, request: ModelRequest, outputs: Iterable[str]) -> tuple[bytes, Arrays | None]:
        """Return the key of a request for `outputs`, and its response if it is there, and count that in its timings."""
        start = time.perf_counter_ns()
        size = sum(array.nbytes for array in request.inputs.values())
        key = self._prefix + await _beside(size, lambda: _digest(request))
        found = self._cache.find(key, tuple(dict.fromkeys(outputs)))
        taken_ns = _taken_ns(start)
        lookups = self.lookups.setdefault(request.context.version, Lookups())
        if found is not None:
            request.context.timings.cache_hit_ns += taken_ns
            lookups.hits += 1
            lookups.hit_ns += taken_ns
        else:
            request.context.timings.cache_miss_ns += taken_ns
            lookups.misses += 1
            lookups.miss_ns += taken_ns
        return key, found

    async def insert(self, key: bytes, outputs: Arrays, context: Context) -> None:
        """Keep a copy of outputs, whose memory may be used for other things later. `context`: of the request that missed."""
        start = time.perf_counter_ns()
        size = _ENTRY_BYTES + sum(map(size_of, outputs.values()))
        if self._cache.fits(size):
            kept = await _beside(size, lambda: {name: _copied(array) for name, array in outputs.items()})
            if not self._is_closed:
                self._cache.insert(key, kept, size)
        taken_ns = _taken_ns(start)
        context.timings.cache_miss_ns += taken_ns
        self.lookups.setdefault(context.version, Lookups()).miss_ns += taken_ns

    def close(self) -> None:
        self._is_closed = True
        self._cache.drop(self._number, self._prefix)


def _digest(request: ModelRequest) -> bytes:
    digest = hashlib.blake2b(request.context.version.encode(), digest_size=32)
    for name in sorted(request.inputs):
        head, raw = wire.pack(name, request.inputs[name])
        digest.update(repr((name, head.datatype, head.shape, head.size)).encode())
        digest.update(raw)
    return digest.digest()


def size_of(array: Array) -> int:
    """Return how many bytes an output takes to be."""
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(len(element) for element in array.reshape(-1)) + _ELEMENT_BYTES * array.size


def _copied(array: Array) -> Array:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def _taken_ns(start_ns: int) -> int:
    """Return the time since `start_ns`, at least 1: above 0 means that there was a lookup."""
    return max(1, time.perf_counter_ns() - start_ns)


async def _beside(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _LARGE_BYTES else work()
