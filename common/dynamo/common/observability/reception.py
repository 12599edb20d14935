"""When a frontend received a request, for the trace files of workers on its host.

Times are of `perf_counter_ns`: on Linux one clock for all processes of a host, from one boot to the next. What comes from another
host, where that clock is another one, is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from dynamo.common.shared_memory.files import boot_id

_HEADER = "dynamo-received"


class EdgeProtocol(StrEnum):
    """The protocol by which a request came."""

    HTTP = "HTTP"
    GRPC = "GRPC"


_NAMES = {
    EdgeProtocol.HTTP: ("HTTP_RECV_START", "HTTP_RECV_END"),
    EdgeProtocol.GRPC: ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
}


@dataclass(frozen=True, slots=True)
class Reception:
    """A frontend read a request in this time."""

    edge: EdgeProtocol
    start_ns: int
    end_ns: int

    def headers(self) -> dict[str, str]:
        """Return what the worker gets; nothing if this host has no clock that can be named."""
        clock = _clock()
        return {_HEADER: f"{self.edge} {self.start_ns} {self.end_ns} {clock}"} if clock else {}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Reception | None:
        """Return what a frontend with the same clock has sent; None if there is nothing."""
        text = headers.get(_HEADER)
        if text is None:
            return None
        edge, start_ns, end_ns, clock = text.split(" ")
        return cls(EdgeProtocol(edge), int(start_ns), int(end_ns)) if clock == _clock() else None

    def timestamps(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return the times under Triton's names."""
        start, end = _NAMES[self.edge]
        return (start, self.start_ns), (end, self.end_ns)


@cache
def _clock() -> str:
    """Return the name of the clock that this process reads: its boot and its time namespace. Empty: it has none."""
    try:
        boot = boot_id()
    except OSError:
        return ""
    try:
        return f"{boot}.{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel without time namespaces
        return boot
