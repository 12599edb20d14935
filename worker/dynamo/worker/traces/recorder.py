"""Which requests are traced, and when traces are written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from threading import Lock
from typing import TypeAlias

from dynamo.common.errors import DynamoError
from dynamo.common.observability.server_settings import SERVER, ServerSettings, TraceSettings, why_not_traced
from dynamo.common.options import TraceMode, TraceOptions
from dynamo.common.process.background import awaited, running
from dynamo.worker.traces.files import TraceFiles
from dynamo.worker.traces.trace import Trace, TraceGroup

log = logging.getLogger(__name__)

_MAX_WAITING = 1000
"""Groups of traces that wait for the thread that writes them; further ones are dropped."""
MAX_TENSOR_BYTES = 64 * 2**20
"""Bytes of tensors in traces that are not written yet, at most. A tensor that finds no room is written without data."""
_MAX_PENDING_CHARS = 16 * 2**20
"""Characters of traces that wait for others of their file, at most; beyond, the file is written before it is complete."""


class _Sampler:
    """Chooses requests by one version of the trace settings, and collects their traces."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self._requests = 0
        self._left = settings.count
        self._collected = 0
        self._pending: list[str] = []
        self._pending_chars = 0

    def __repr__(self) -> str:
        return f"<_Sampler of {self.settings}, {self._left} traces left>"

    def is_sampled(self) -> bool:
        """Count a request. Return whether it is traced."""
        self._requests += 1
        if self._requests % self.settings.rate or not self._left:
            return False
        self._left -= self._left > 0
        return True

    def collect(self, traces: str, files: TraceFiles) -> None:
        """Write traces, or keep them for a file with others. Raises OSError."""
        self._collected += 1
        if not self.settings.log_frequency and self.settings.count < 0:
            return files.append(traces)
        self._pending.append(traces)
        self._pending_chars += len(traces)
        is_complete = self._collected == self.settings.count or len(self._pending) == self.settings.log_frequency
        if is_complete or self._pending_chars > _MAX_PENDING_CHARS:
            files.write_numbered(self._taken())
        return None

    def finish(self, files: TraceFiles) -> None:
        """Write what is left. Raises OSError."""
        if self._pending and self.settings.log_frequency:
            files.write_numbered(self._taken())
        elif self._pending:
            files.append(self._taken())

    def _taken(self) -> str:
        pending, self._pending, self._pending_chars = self._pending, [], 0
        return ",".join(pending)


_Work: TypeAlias = tuple[_Sampler, TraceGroup | None]
"""Traces of a sampler, or, with None, its end."""


class TritonTraces:
    """The traces of one worker. Use `open_triton_traces`."""

    def __init__(self, options: TraceOptions, instance: str) -> None:
        self.is_on = False
        """Whether any request may be traced."""
        self._options = options
        self._samplers: dict[str, _Sampler | None] = {SERVER: None}
        """By model; None: not traced."""
        self._numbers = count(1)
        self._files = None if options.file is None else TraceFiles(options.file, instance, options.file_max_bytes)
        self._work: asyncio.Queue[_Work] = asyncio.Queue(_MAX_WAITING)
        self._tensor_bytes = 0
        self._lock = Lock()
        """Guards `_tensor_bytes`, which the writing thread reduces."""
        self._writing = Lock()
        """A thread that was left behind by `write` may still write when `finish` begins."""
        self._has_failed = False

    def __repr__(self) -> str:
        return f"<TritonTraces to {self._files}, {self._samplers}>"

    @property
    def to_collector(self) -> bool:
        """Whether sampled requests go to the OpenTelemetry collector rather than to files."""
        return self._options.mode is TraceMode.OPENTELEMETRY

    def use(self, settings: ServerSettings) -> None:
        """Trace by these settings from now on. Those of a model that have not changed go on counting."""
        former, self._samplers = self._samplers, {}
        for model in {SERVER, *settings.trace}:
            wanted = settings.trace_of(model)
            before = former.get(model)
            if before is not None and before.settings == wanted:
                self._samplers[model] = former.pop(model)
                continue
            why_not = why_not_traced(wanted, self._options)
            if why_not and wanted.levels:
                log.warning("the trace settings of %s are not followed here: %s", model or "the server", why_not)
            self._samplers[model] = None if why_not else _Sampler(wanted)
        for sampler in former.values():
            if sampler is not None:
                self._put((sampler, None))
        self.is_on = any(self._samplers.values())

    def is_sampled(self, model: str) -> bool:
        """Count a request to a model. Return whether it is traced."""
        sampler = self._sampler(model)
        return sampler is not None and sampler.is_sampled()

    def begin(self, model: str, version: str, request_id: str) -> Trace | None:
        """Count a request to a model. Return its trace; None if it is not traced."""
        sampler = self._sampler(model)
        if sampler is None or not sampler.is_sampled():
            return None
        group = TraceGroup(sampler.settings.levels, self._numbers.__next__, self._reserve, partial(self._ended, sampler))
        return group.begin(model, version, request_id)

    def _sampler(self, model: str) -> _Sampler | None:
        samplers = self._samplers
        return samplers[model] if model in samplers else samplers[SERVER]

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self._tensor_bytes + size > MAX_TENSOR_BYTES:
                return False
            self._tensor_bytes += size
            return True

    def _ended(self, sampler: _Sampler, group: TraceGroup) -> None:
        if not self._put((sampler, group)):
            self._release(group)

    def _put(self, work: _Work) -> bool:
        try:
            self._work.put_nowait(work)
        except asyncio.QueueFull:
            self._fail("more traces end than can be written")
            return False
        return True

    def _release(self, group: TraceGroup) -> None:
        with self._lock:
            self._tensor_bytes -= group.tensor_bytes

    async def write(self) -> None:
        """Write traces until cancelled."""
        while True:
            writing = awaited(asyncio.to_thread(self._write, *await self._work.get()))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # a thread that has not begun would never begin, and the trace be lost
                raise

    def finish(self) -> None:
        """Write all that has ended. Call it when `write` has ended."""
        while not self._work.empty():
            self._write(*self._work.get_nowait())
        for sampler in self._samplers.values():
            if sampler is not None:
                self._write(sampler, None)

    def _write(self, sampler: _Sampler, group: TraceGroup | None) -> None:
        if self._files is None:
            return
        try:
            with self._writing:
                if group is None:
                    sampler.finish(self._files)
                else:
                    sampler.collect(group.encode(), self._files)
            self._has_failed = False
        except (OSError, DynamoError) as error:  # the latter: a model gave an output that is not what it says
            self._fail(str(error))
        finally:
            if group is not None:
                self._release(group)

    def _fail(self, why: str) -> None:
        """Log once, until a trace is written again, that traces are lost."""
        if not self._has_failed:
            self._has_failed = True
            log.error("traces are dropped: %s", why)


@asynccontextmanager
async def open_triton_traces(options: TraceOptions, instance: str) -> AsyncIterator[TritonTraces]:
    """Write traces while the body runs, and what is left after it. `instance` becomes a part of the names of files."""
    traces = TritonTraces(options, instance)
    try:
        async with running(traces.write(), "trace files"):
            yield traces
    finally:
        await asyncio.to_thread(traces.finish)
