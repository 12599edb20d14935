"""Requests at a fixed rate, whether or not those before them have ended: a slow server gets no fewer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.http_client import HttpConnection, Response, connect


@dataclass(slots=True)
class Sent:
    """What became of requests."""

    positions: list[int] = field(default_factory=list)
    """The prompts of those that were served, by position."""
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, position: int, response: Response) -> None:
        if response.error:
            self.errors[response.error] = self.errors.get(response.error, 0) + 1
            return
        self.positions.append(position)
        self.first_s.append(response.first_at - response.sent_at)
        self.whole_s.append(response.ended_at - response.sent_at)

    def extend(self, other: Sent) -> None:
        """Add what became of other requests."""
        self.positions += other.positions
        self.first_s += other.first_s
        self.whole_s += other.whole_s
        for error, count in other.errors.items():
            self.errors[error] = self.errors.get(error, 0) + count


class Sender:
    """Connections of one kind of request to a frontend."""

    def __init__(self, port: int, requests: Iterator[tuple[int, bytes]], output_tokens: int) -> None:
        self._port = port
        self._requests = requests
        self._output_tokens = output_tokens
        self._idle: list[HttpConnection] = []

    async def send(self, rate: float, seconds: float) -> Sent:
        """Send `rate` requests a second, evenly, and return when the last of them has ended."""
        sent = Sent()
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(round(rate * seconds)):
                request = next(self._requests)
                await asyncio.sleep(max(0.0, begun + number / rate - asyncio.get_running_loop().time()))
                tasks.create_task(self._send(*request, sent))
        return sent

    async def _send(self, position: int, request: bytes, sent: Sent) -> None:
        self._idle = [connection for connection in self._idle if not connection.broken]
        connection = self._idle.pop() if self._idle else await connect(self._port, self._output_tokens)
        response = connection.send(request)
        await response.done
        sent.add(position, response)
        if not connection.broken:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
