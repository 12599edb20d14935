"""The order of responses with `preserve_ordering`: that of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager

from dynamo.common.errors import DynamoError, Overloaded
from dynamo.worker.engine.request_queue import QueueTimeout
from dynamo.worker.repository.declared.execution import ModelResult, closing


class ResponseOrder:
    """Gives the responses to requests in the order of the requests: those to the second after all to the first.

    The error and the end of a request have their place, too.
    """

    def __init__(self) -> None:
        self._places: dict[asyncio.Event, None] = {}
        """Events of the open requests, in order. The event of the first request is set."""

    async def in_turn(self, response: Awaitable[ModelResult]) -> ModelResult:
        """Return the only response to the next request."""
        with self._place() as is_first:
            try:
                result = await response
            except (QueueTimeout, Overloaded):  # the request has not left the queue
                raise
            except DynamoError:
                await is_first.wait()
                raise
            await is_first.wait()
            return result

    async def ordered(self, responses: AsyncIterator[ModelResult]) -> AsyncIterator[ModelResult]:
        """Yield the responses to the next request."""
        with self._place() as is_first:
            try:
                async with closing(responses):
                    async for response in responses:
                        await is_first.wait()
                        yield response
                await is_first.wait()
            except DynamoError:
                await is_first.wait()
                raise

    @contextmanager
    def _place(self) -> Iterator[asyncio.Event]:
        """Take the last place; yield an event that is set when it is the first."""
        is_first = asyncio.Event()
        self._places[is_first] = None
        self._set_first()
        try:
            yield is_first
        finally:
            del self._places[is_first]
            self._set_first()

    def _set_first(self) -> None:
        first = next(iter(self._places), None)
        if first is not None:
            first.set()
