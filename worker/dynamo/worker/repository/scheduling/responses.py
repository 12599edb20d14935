"""The responses of a model's process to one request: filled by the process, read by the caller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from math import inf
from typing import Protocol

from dynamo.common.errors import DynamoError, EngineError
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelResult
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.raw_tensors import RawTensors

MAX_UNREAD = 8192
"""Responses of one request that wait for a slow caller. A model that sends more, beyond its window, fails its request."""
MAX_UNREAD_BYTES = 256 * 2**20
"""What one request may leave unread; and all those of a model, beyond which none gets a response that it has no window for."""
MAX_MODEL_BYTES = 2**30
"""What all requests of a model may leave unread; beyond that none gets a response that has more than its share."""
_LOOK_EVERY_S = 0.25
"""How often a stream whose window is used up looks whether others wait."""


class ProcessDied(EngineError):
    """The process ended while it had the request."""


class ExecuteRaised(EngineError):
    """The model's `execute` raised an exception, which fails all requests that it had."""


class Rescheduled(EngineError):
    """The model of an iterative sequence wants the request once more; it has had the responses before this."""


class Responses(Protocol):
    """Where the responses to one request go."""

    context: Context
    """Context of the request."""

    @property
    def is_full(self) -> bool:
        """Whether the caller has left so much unread that no further response is kept."""
        ...

    def add(self, item: ModelResult | DynamoError | None) -> None:
        """Add a response, an error, or None at the end."""
        ...

    def close(self) -> None:
        """Drop the responses: the caller has left."""
        ...


class SingleResponse:
    """The only response of a model that is not decoupled."""

    __slots__ = ("_model", "_result", "context", "done")

    def __init__(self, model: str, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        self.context = context
        self.done: asyncio.Future[ModelResult | DynamoError] = loop.create_future()
        self._model = model
        self._result: ModelResult | DynamoError | None = None

    is_full = False

    def add(self, item: ModelResult | DynamoError | None) -> None:
        if isinstance(item, DynamoError):
            self._end(item)
        elif item is None:
            self._end(self._result or EngineError(f"model '{self._model}' gave no response"))
        elif self._result is None:
            self._result = item
        else:
            self._end(EngineError(f"model '{self._model}' gave several responses but is not declared as decoupled"))

    def _end(self, result: ModelResult | DynamoError) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def close(self) -> None:
        self._result = None
        self.done.cancel()


class Unread:
    """What all callers of one model have not read yet."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.streams = 0
        """How many of them have anything to read."""

    @property
    def share_bytes(self) -> float:
        """What one of them may have: any size unless all of them have too much together."""
        return inf if self.size_bytes <= MAX_MODEL_BYTES else MAX_MODEL_BYTES / self.streams


class ResponseStream:
    """The responses of a decoupled model.

    `grant` gives the model credit as the caller reads: it is called with the number of responses that may be sent in total.
    The model may wait for that credit. While others wait for its end, which `is_awaited` says, it gets as much as is kept for a
    slow caller, and the request fails beyond that.
    """

    def __init__(self, grant: Callable[[int], None], context: Context, unread: Unread, is_awaited: Callable[[], bool]) -> None:
        self.context = context
        self.on_reschedule: Callable[[], None] | None = None
        self._items: deque[ModelResult | DynamoError | None] = deque()
        """None marks the end."""
        self._unread_bytes = 0
        self._unread = unread
        self._taken = 0
        self._sent = 0
        self._allowed = wire.RESPONSE_WINDOW
        self._is_awaited = is_awaited
        self._look: asyncio.TimerHandle | None = None
        """Runs while the window is used up."""
        self.has_ended = False
        """Whether all responses are here, or an error, read or not."""
        self._grant = grant
        self._added = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<ResponseStream, unread={len(self._items)}, unread_bytes={self._unread_bytes}, taken={self._taken}>"

    @property
    def is_full(self) -> bool:
        count = len(self._items)
        most_bytes = self._unread.size_bytes if count > wire.RESPONSE_WINDOW else self._unread_bytes
        return count >= MAX_UNREAD or most_bytes > MAX_UNREAD_BYTES or self._unread_bytes > self._unread.share_bytes

    def add(self, item: ModelResult | DynamoError | None) -> None:
        if not self._closed:
            self._items.append(item)
            if isinstance(item, ModelResult):
                self._count(_size_of(item))
                self._sent += 1
                if self._sent >= self._allowed and self._look is None:
                    self._check_window()
            else:
                self.has_ended = True
                if self._look is not None:
                    self._look.cancel()
            self._added.set()
        if isinstance(item, Rescheduled) and self.on_reschedule is not None:
            self.on_reschedule()

    def close(self) -> None:
        self._closed = True
        self._items.clear()
        self._count(-self._unread_bytes)
        if self._look is not None:
            self._look.cancel()

    def _count(self, size_bytes: int) -> None:
        had_any = self._unread_bytes > 0
        self._unread_bytes += size_bytes
        self._unread.streams += (self._unread_bytes > 0) - had_any
        self._unread.size_bytes += size_bytes

    def _check_window(self) -> None:
        self._look = None
        if self._sent < self._allowed:
            return
        if self._is_awaited():
            self._allow(self._taken + MAX_UNREAD + 1)  # the last of them fails the request
        self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._check_window)

    def _allow(self, total: int) -> None:
        if total > self._allowed:
            self._allowed = total
            self._grant(total)

    async def read(self) -> AsyncGenerator[ModelResult, None]:
        """Yield the responses. Raises the error that ended the request."""
        while True:
            while not self._items:
                self._added.clear()
                await self._added.wait()
            item = self._items.popleft()
            if item is None:
                return
            if isinstance(item, DynamoError):
                raise item
            self._count(-_size_of(item))
            self._taken += 1
            if self._taken % (wire.RESPONSE_WINDOW // 2) == 0:
                self._allow(self._taken + wire.RESPONSE_WINDOW)
            yield item


def _size_of(response: ModelResult) -> int:
    outputs = response.outputs
    if isinstance(outputs, RawTensors):
        return sum(map(len, outputs.raws))
    return sum(array.nbytes for array in outputs.values())
