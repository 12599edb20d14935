"""What a connection needs of the server that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dynamo.common.process.steps import Steps
from dynamo.common.process.turns import LoopTurns
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.http2.call import GrpcCall
from dynamo.frontend.api.rpc.http2.deadlines import Deadlines
from dynamo.frontend.api.rpc.http2.messages import MessageMemory
from dynamo.frontend.api.rpc.http2.method import GrpcMethod
from dynamo.frontend.config import GrpcOptions, OverloadStatus


class Http2ConnectionOwner(Protocol):
    """The server that a connection belongs to."""

    options: GrpcOptions
    capacity: Capacity
    overload: OverloadStatus
    inflating: Steps
    deadlines: Deadlines
    read_memory: memoryview
    """Shared by all connections, for what they receive."""
    turns: LoopTurns
    resets_per_s: float
    connection_window_bytes: int
    stream_window_bytes: int

    @property
    def methods(self) -> Mapping[bytes, GrpcMethod]: ...

    def allocate(self, size: int) -> MessageMemory:
        """Return memory for a message."""
        ...

    def max_age_s(self) -> float:
        """Return the age at which a new connection is drained; infinite without a limit."""
        ...

    def opened(self, connection: Any) -> bool:
        """Count a new connection; False if it is not to be served. `connection`: the `Http2Connection`, whose module imports
        this one."""
        ...

    def closed(self, connection: Any) -> None: ...

    def call_started(self, call: GrpcCall) -> None: ...

    def call_done(self, call: GrpcCall) -> None: ...
