"""A request of a gateway, as the operations of HTTP take requests; what they respond is a refusal, or comes too late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import unquote

from dynamo.common.http.served import ClientWatch, Header
from dynamo.common.messaging.buffers import Buffer

_SMALL_BYTES = 2048
"""Parts below are gathered: an object takes more than the two bytes that a part may have."""


class GatewayBody:
    """The body of a request, as it comes, which is read once by the operation, and once more on the way to the endpoint."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        """What has come, but for small parts that are being gathered."""
        self.is_complete = False
        self._gathered = bytearray()
        self._arrival: asyncio.Future[None] | None = None

    @property
    def size_bytes(self) -> int:
        """How much has come."""
        return sum(map(len, self.parts)) + len(self._gathered)

    def add(self, part: bytes, *, is_last: bool) -> None:
        self.is_complete = is_last
        if self._gathered or len(part) < _SMALL_BYTES:
            self._gathered += part
            if not is_last and len(self._gathered) < _SMALL_BYTES:
                return
            self.flush()
        else:
            self.parts.append(part)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def flush(self) -> None:
        """Have all that has come in `parts`."""
        if self._gathered:
            self.parts.append(bytes(self._gathered))
            self._gathered.clear()

    async def part(self, number: int) -> bytes | None:
        """Return the part with this number, when it has come; None after the last."""
        while number >= len(self.parts):
            if self.is_complete:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self.parts[number]

    def replace(self, body: bytes) -> None:
        """Have another body in the place of this one, which is complete."""
        self.parts = [body]

    def clear(self) -> None:
        """Forget what has come: it is on its way."""
        self.parts.clear()
        self._gathered.clear()

    def joined(self) -> bytes:
        self.flush()
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class GatewayRequest:
    """One try to have a request served by an operation."""

    scheme = "http"
    query = b""

    def __init__(self, method: str, path: str, headers: Sequence[Header], client: str, body: GatewayBody) -> None:
        self.method = method
        path, _, query = path.partition("?")
        self.path = unquote(path)
        self.raw_path = path.encode("latin-1", "replace")
        self.query = query.encode("latin-1", "replace")
        self.headers = headers
        self.client = client
        self.watch = ClientWatch()
        self.on_half_close: Callable[[], None] | None = None
        self.status = 0
        """The status of the response; 0: there is none."""
        self.response_headers: Sequence[Header] = ()
        self.response: deque[bytes] = deque()
        """The parts of the response's body, as long as it `is_wanted`."""
        self.is_wanted = True
        self.check: Callable[[], Awaitable[None]] | None = None
        """Called when the body is complete, before what reads it has its last part. May raise DynamoError."""
        self._body = body
        self._number = 0
        """How many parts of the body were read."""
        self.more_body = True

    async def read(self) -> bytes | None:
        if not self.more_body:
            await asyncio.Event().wait()  # for the client, who leaves by the gateway
        part = await self._body.part(self._number)
        if self.check is not None and self._body.is_complete:
            check, self.check = self.check, None
            await check()
        if part is None:  # it ended with a part that was empty
            self.more_body = False
            return b""
        self._number += 1
        self.more_body = not self._body.is_complete or self._number < len(self._body.parts)
        return part

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        if self.is_wanted:
            self.status, self.response_headers = status, headers

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        if self.is_wanted:
            self.response.append(bytes(body))
