"""Trace and log settings that clients change at run time (Triton's extensions): one document for all processes of a namespace.

A frontend changes it, every frontend and worker follows it. It outlives all of them: it holds until it is changed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from dynamo.common.etcd import Etcd
from dynamo.common.etcd.document import DocumentType, EtcdDocument
from dynamo.common.names import server_settings_key
from dynamo.common.observability.log_settings import LogSettings
from dynamo.common.options import TraceMode, TraceOptions
from dynamo.common.process.background import running

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)
"""Trace levels, in the order in which they are shown; with none of them, tracing is OFF."""
SERVER = ""
"""Stands for the server among the names of models."""


class TraceChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What clients have set of the trace settings of the server, or of a model. None: not set."""

    levels: tuple[str, ...] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    number: int = 0
    """Number of changes so far. Each change begins counting the requests and traces of its models anew."""

    @property
    def is_empty(self) -> bool:
        return self.levels is None and self.rate is None and self.count is None and self.log_frequency is None


class ServerSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    trace: dict[str, TraceChange] = {}
    """By model."""
    log: LogSettings = LogSettings()

    def trace_of(self, model: str) -> TraceSettings:
        """Return the trace settings of a model: its own, then those of the server, then the defaults."""
        server, own = self.trace.get(SERVER, _UNCHANGED), self.trace.get(model, _UNCHANGED)
        return TraceSettings(
            levels=_first(own.levels, server.levels, ()),
            rate=_first(own.rate, server.rate, 1000),
            count=_first(own.count, server.count, -1),
            log_frequency=_first(own.log_frequency, server.log_frequency, 0),
            numbers=(server.number, own.number),
        )


_UNCHANGED = TraceChange()


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How a model is traced."""

    levels: tuple[str, ...]
    rate: int
    """Each request whose number is a multiple of it is traced."""
    count: int
    """Traces that are made; -1: without end."""
    log_frequency: int
    """Traces per file; 0: all of them in one."""
    numbers: tuple[int, int]
    """Numbers of changes of the server's settings and of the model's."""


T = TypeVar("T")


def _first(own: T | None, server: T | None, default: T) -> T:
    if own is not None:
        return own
    return default if server is None else server


def why_not_traced(settings: TraceSettings, options: TraceOptions) -> str:
    """Return why these settings cannot trace anything, in Triton's words; empty if they can."""
    if not settings.levels:
        return "tracing is disabled"
    if not settings.rate:
        return "sample rate must be non-zero"
    if options.mode is TraceMode.TRITON and options.file is None:
        return "trace file name is not given"
    return ""


Change = Callable[[ServerSettings], ServerSettings]


class SettingsStore(Protocol):
    """Where the settings lie."""

    @property
    def value(self) -> ServerSettings: ...

    def change(self, change: Change) -> Awaitable[None]:
        """Replace the settings by what `change` makes of them. Raises what that raises, and Unavailable."""
        ...


class LocalSettings:
    """Settings of one process, which end with it."""

    def __init__(self) -> None:
        self.value = ServerSettings()

    async def change(self, change: Change) -> None:
        self.value = change(self.value)


@asynccontextmanager
async def open_server_settings(
    etcd: Etcd, namespace: str, on_change: Callable[[ServerSettings], None]
) -> AsyncIterator[SettingsStore]:
    """Follow the settings of a namespace while the body runs, and call `on_change` with each new version of them."""
    document = EtcdDocument(etcd, server_settings_key(namespace), _DOCUMENT, on_change)
    async with running(document.follow(), "trace and log settings"):
        yield document


_DOCUMENT = DocumentType(
    "trace and log settings", ServerSettings(), msgspec.json.encode, msgspec.json.Decoder(ServerSettings).decode
)
