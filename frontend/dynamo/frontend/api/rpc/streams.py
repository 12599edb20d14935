"""Reading the requests of a bidirectional call in a way that a shutdown can end."""

from __future__ import annotations

import asyncio

from dynamo.common.errors import ShuttingDown
from dynamo.frontend.api.rpc.server import Context


class StreamDrain:
    """Ends the waiting for further requests in all calls of a process; what was read before is not touched."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self._started = False

    async def read(self, context: Context) -> bytes | None:
        """The next message, None after the client's last. Raises ShuttingDown once `start` was called."""
        if self._started:
            raise ShuttingDown()
        wait = asyncio.timeout(None)  # a scope that `start` can end, without a task per read
        self._waits.add(wait)
        try:
            async with wait:
                data: object = await context.read()
        except TimeoutError:
            if wait.expired():
                raise ShuttingDown() from None
            raise
        finally:
            self._waits.discard(wait)
        return data if isinstance(data, bytes) else None  # grpc.aio.EOF

    def start(self) -> None:
        self._started = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
