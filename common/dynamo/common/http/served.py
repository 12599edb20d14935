"""What an application gets of a request, and how it responds: a server's requests, and those that no client sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from dynamo.common.messaging.buffers import Buffer

Header: TypeAlias = tuple[bytes, bytes]


def media_type(content_type: str) -> str:
    """Return what a content type says without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


class ClientWatch(msgspec.Struct, eq=False):
    """Calls a function when the client of a request leaves, which takes no task that waits for it in `read`."""

    has_left: bool = False
    on_leave: Callable[[], None] | None = None
    """Called at most once; not if the client has left before it is set."""

    def leave(self) -> None:
        if self.has_left:
            return
        self.has_left = True
        if self.on_leave is not None:
            self.on_leave()


class ServedRequest(Protocol):
    """A request whose head has come. The response is `begin` and then `write`, the last time with `is_last`."""

    method: str
    scheme: str
    """Scheme of the server's port."""
    path: str
    """Decoded."""
    raw_path: bytes
    query: bytes
    """What follows the `?`."""
    headers: Sequence[Header]
    """With names in lower case, as often as they were sent."""
    client: str
    """Address of the client."""
    watch: ClientWatch
    more_body: bool
    """Whether more of the body may follow what `read` has returned."""
    on_half_close: Callable[[], None] | None
    """Writes something harmless into a streamed response; called when the client has closed its side, and may be gone."""

    async def read(self) -> bytes | None:
        """Return the next part of the body; None if the client has left, or the response is complete."""
        ...

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Give the head of the response, which leaves with the first part of its body.

        After the status 101 the connection speaks another protocol until the last `write`: `read` and `write` are its bytes.
        """
        ...

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        """Send a part of the response's body. Waits while the client is slow; does nothing if it has left."""
        ...


App: TypeAlias = Callable[[ServedRequest], Awaitable[None]]
