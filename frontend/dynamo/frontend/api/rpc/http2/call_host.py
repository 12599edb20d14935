"""What a call needs of its connection."""

from __future__ import annotations

from typing import Any, Protocol

from dynamo.common.process.steps import Steps
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.http2.messages import MessageMemory
from dynamo.frontend.api.rpc.http2.sender import Sender
from dynamo.frontend.config import GrpcOptions, OverloadStatus


class CallHost(Protocol):
    """The connection of a call."""

    sender: Sender
    options: GrpcOptions
    capacity: Capacity
    overload: OverloadStatus
    inflating: Steps
    """Takes steps of decompressions, one of the calls of all connections in a turn of the event loop."""
    peer: str

    @property
    def stream_window_bytes(self) -> int: ...

    def grant(self, stream: int, more: int) -> None:
        """Let the client send more bytes of a stream."""
        ...

    def allocate(self, size: int) -> MessageMemory:
        """Return memory for a message."""
        ...

    def call_started(self, call: Any) -> None:
        """`call`: the `GrpcCall`, whose module imports this one."""
        ...

    def call_done(self, call: Any) -> None:
        """The task of the call's handler has ended."""
        ...


def peer_name(address: object) -> str:
    """Return an address as gRPC writes it."""
    match address:
        case (str(host), int(port)):
            return f"ipv4:{host}:{port}"
        case (str(host), int(port), *_):
            return f"ipv6:[{host}]:{port}"
        case _:
            return "unknown"
