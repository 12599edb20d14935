"""A request as the HTTP server gives it to an application, without the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import httpx2

from dynamo.common.http.served import App, ClientWatch, Header
from dynamo.common.messaging.buffers import Buffer


class Asking:
    """A request whose client reads all of the response."""

    scheme = "http"
    client = "127.0.0.1"

    def __init__(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Sequence[Header] = (),
        query: str = "",
        body: bytes | None = None,
        watch: ClientWatch | None = None,
    ) -> None:
        """Without a `body`, nothing may read it."""
        self.method = method
        self.path = path
        self.raw_path = path.encode()
        self.query = query.encode()
        self.headers = headers
        self.watch = watch or ClientWatch()
        self.more_body = True
        self.on_half_close: Callable[[], None] | None = None
        self.status = 0
        self.response_headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        """The parts of the response's body, as they were written."""
        self._body = body

    @property
    def response(self) -> bytes:
        return b"".join(self.parts)

    async def read(self) -> bytes | None:
        if self._body is None:
            raise AssertionError("the body was read")
        if not self.more_body:
            return None
        self.more_body = False
        return self._body

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        assert not self.status, "the response has begun already"
        self.status, self.response_headers = status, dict(headers)

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        self.parts.append(bytes(body))


class Unanswered(Asking):
    """A request that nothing is read of, and that gets no response."""

    def begin(self, status: int, headers: Sequence[Header]) -> NoReturn:
        raise AssertionError("the request got a response")


class AppTransport(httpx2.AsyncBaseTransport):
    """Hands what a client requests to an application."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        query = request.url.query.decode()
        asking = Asking(request.url.path, method=request.method, headers=headers, query=query, body=await request.aread())
        await self._app(asking)
        return httpx2.Response(asking.status, headers=list(asking.response_headers.items()), content=asking.response)
