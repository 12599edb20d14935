"""Reading the requests of bidirectional calls, interruptible by a shutdown."""

from __future__ import annotations

import asyncio

from dynamo.common.errors import ShuttingDown
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.rpc.operation import Context


class StreamDrain:
    """Stops reading further requests in all bidirectional calls of a process. Requests that were read are still served."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self._started = False

    async def read(self, context: Context) -> Buffer | None:
        """Return the next message, None after the client's last one. Raises ShuttingDown once `start` was called."""
        if self._started:
            raise ShuttingDown()
        wait = asyncio.timeout(None)  # `start` can end it, and it needs no task per read
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
        return data if isinstance(data, bytes | memoryview) else None  # grpc.aio.EOF

    def start(self) -> None:
        self._started = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
