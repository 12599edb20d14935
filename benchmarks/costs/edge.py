"""Connections of clients to the servers of a simulated frontend: bytes arrive whole, each write after the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

from benchmarks.costs.counting import Count

LATENCY_S = 0.0001


class End(asyncio.Transport):
    """One end of a connection; `other` is set once both exist."""

    other: End

    def __init__(self, protocol: asyncio.BaseProtocol, context: Context, count: Count) -> None:
        super().__init__()
        self._protocol = protocol
        self._context = context
        self._count = count
        self._is_closing = False

    def connected(self) -> None:
        self._context.copy().run(self._protocol.connection_made, self)

    def write(self, data: Any) -> None:
        self._count.add("sends")
        other = self.other
        asyncio.get_running_loop().call_later(LATENCY_S, other.received, bytes(data), context=other._context.copy())

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def received(self, data: bytes) -> None:
        """Hand bytes to the protocol."""
        if self._is_closing:
            return
        protocol: Any = self._protocol  # to cast it would count as a call of the process
        if not isinstance(protocol, asyncio.BufferedProtocol):
            self._count.add("receives")
            protocol.data_received(data)
            return
        view = memoryview(data)
        while view.nbytes:
            self._count.add("receives")
            buffer = memoryview(protocol.get_buffer(view.nbytes))
            size = min(buffer.nbytes, view.nbytes)
            buffer[:size] = view[:size]
            protocol.buffer_updated(size)
            view = view[size:]

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._protocol.connection_lost, None, context=self._context.copy())
            loop.call_later(LATENCY_S, self.other.close, context=self.other._context.copy())

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Clients read at once: nothing is ever buffered."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Requests are smaller than what a server reads ahead."""

    def resume_reading(self) -> None:
        """See `pause_reading`."""

    def can_write_eof(self) -> bool:
        return False


def join(client: asyncio.BaseProtocol, server: Callable[[], asyncio.BaseProtocol], server_context: Context, count: Count) -> None:
    """Connect a client with a new protocol of a server."""
    near = End(client, Context(), count)
    far = End(server_context.copy().run(server), server_context, count)
    near.other, far.other = far, near
    far.connected()
    near.connected()
