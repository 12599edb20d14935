"""Queue and order of the requests of a decoupled model, whose `execute` returns long before the last response.

release = await gate.enter(options)                     # the request has left the queue
async for response in order.ordered(responses): ...     # `release` is called when `execute` has returned
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from dynamo.common.errors import DynamoError
from dynamo.worker.engine.request_queue import Queued, QueueOptions, QueuePolicies, QueueTimeout, RequestQueue
from dynamo.worker.repository.execution import ModelResult, closing


class _Waiter(Queued):
    """A request in the queue."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        super().__init__()
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class RequestGate:
    """Lets in one request for each of its slots. Further ones wait in a queue with these policies."""

    def __init__(self, policies: QueuePolicies, slots: int) -> None:
        self._queue: RequestQueue[_Waiter] = RequestQueue(policies, self._advance, _reject)
        self._free = slots

    def __repr__(self) -> str:
        return f"<RequestGate, free={self._free}, waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, options: QueueOptions) -> Callable[[], None]:
        """Wait for a slot. Return what gives it back, which is to be called once. Raises Overloaded and QueueTimeout."""
        if self._free:  # then nothing waits
            self._free -= 1
            return self._release
        waiter = _Waiter()
        self._queue.add(waiter, options)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._queue.remove(waiter)
            elif waiter.turn.exception() is None:  # a slot came in the very turn of the event loop in which the caller left
                self._release()
            raise
        return self._release

    def close(self) -> None:
        """Cancel the requests that wait."""
        for waiter in tuple(self._queue):
            waiter.turn.cancel()

    def _release(self) -> None:
        self._free += 1
        self._advance()

    def _advance(self) -> None:
        while self._free and (waiter := next(iter(self._queue), None)) is not None:
            self._queue.remove(waiter)
            if not waiter.turn.done():  # done: its caller has left in this turn of the event loop
                self._free -= 1
                waiter.turn.set_result(None)


def _reject(waiter: _Waiter, error: QueueTimeout) -> None:
    if not waiter.turn.done():
        waiter.turn.set_exception(error)


class ResponseOrder:
    """Yields the responses to requests in the order of the requests: those to the second after all to the first."""

    def __init__(self) -> None:
        self._places: dict[asyncio.Event, None] = {}
        """Of the open requests, in order. That of the first one is set."""

    async def ordered(self, responses: AsyncIterator[ModelResult]) -> AsyncIterator[ModelResult]:
        """Yield the responses to the next request. Its error and its end have their place, too."""
        is_first = asyncio.Event()
        self._places[is_first] = None
        self._set_first()
        try:
            async with closing(responses):
                async for response in responses:
                    await is_first.wait()
                    yield response
            await is_first.wait()
        except DynamoError:
            await is_first.wait()
            raise
        finally:
            del self._places[is_first]
            self._set_first()

    def _set_first(self) -> None:
        first = next(iter(self._places), None)
        if first is not None:
            first.set()
