"""A request as a worker's handler gets it, and what the handler sends back, without a bus in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo.common.process.lazy_event import LazyEvent

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]


def joined(body: Body) -> bytes:
    return bytes(body) if isinstance(body, Buffer) else b"".join(bytes(piece) for piece in body)


class FakeIncoming:
    """Keeps the protocol of the request plane: a window of answers, credit, one last word, nothing after it."""

    def __init__(self, body: Body, *, deadline: float | None = None, window: int = 1000, request_id: str = "r1") -> None:
        self.request_id = request_id
        self.headers: dict[str, str] = {"request-id": request_id}
        self.deadline = deadline
        self.cancelled = LazyEvent()
        self.body: Buffer = joined(body)
        self.sent: list[bytes] = []
        self.final: bytes | None = None
        self.lent_bytes: list[int] = []
        """Sizes of the responses that were to be lent in steps."""
        self.window = window
        self.waiting = asyncio.Event()
        """Set while the handler waits for credit."""
        self._credit = asyncio.Event()

    def send_nowait(self, body: Body) -> bool:
        assert self.final is None, "an answer was sent after the last word"
        self.sent.append(joined(body))
        self.window -= 1
        return self.window > 0

    async def ready(self) -> None:
        while self.window <= 0:
            self.waiting.set()
            self._credit.clear()
            await self._credit.wait()
        self.waiting.clear()

    async def lend_in_steps(self, body: Body, *, last: bool = False) -> Body:
        self.lent_bytes.append(len(joined(body)))
        return body

    def end(self, body: Body = b"") -> None:
        assert self.final is None, "two last words"
        self.final = joined(body)

    def grant(self, responses: int) -> None:
        self.window += responses
        self._credit.set()
