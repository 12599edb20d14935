"""Callers of a drill: paced tensor requests and a few text streams to all frontends, and what became of each."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Self

import grpc

from tests.drill.caches import MODEL
from tests.drill.fleet import DrilledFleet
from tests.support.fleet import Client, FleetFrontend, Text, connect, echo_request, text_request

DEADLINE_S = 60.0
_SIZE_BYTES = 4096
_TOKENS = 200
_CACHED_PROMPTS = 40
"""Prompts of the model with tiers, of some 20 blocks each: more than the GPUs of all workers hold."""
_CACHED_EVERY_S = 0.1
Sending = Callable[[Client], Awaitable[None]]
_RESENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_NOT_SENT = "Internal error from Core"
"""What grpc.aio says when the connection ends while it begins a call."""


class Clients:
    """A connection to each frontend, made at its first use."""

    def __init__(self, fleet: DrilledFleet) -> None:
        self._fleet = fleet
        self._clients: dict[str, Client] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def get(self, number: int) -> Client:
        """Return the client of the frontend whose turn it is."""
        return await self._of(self._fleet.frontends[number % len(self._fleet.frontends)])

    async def other_than(self, client: Client) -> Client | None:
        """Return the client of another live frontend, None if there is none."""
        for frontend in self._fleet.frontends:
            if frontend.process.process.returncode is None and (other := await self._of(frontend)) is not client:
                return other
        return None

    async def _of(self, frontend: FleetFrontend) -> Client:
        if frontend.target not in self._clients:
            self._clients[frontend.target] = await self._stack.enter_async_context(connect(frontend.target))
        return self._clients[frontend.target]


async def expected_texts(fleet: DrilledFleet, streams: int) -> list[str]:
    """Return the texts that the streams of a load must get, one after the other."""
    async with connect(fleet.frontends[0].target) as client:
        return [(await client.text(_text_request(number))).text for number in range(streams)]


@dataclass
class Load:
    """Requests whose frontend is gone, or on its way out, are sent once more, to another one, as a balancer would."""

    fleet: DrilledFleet
    per_s: float
    texts: Sequence[str]
    """What `expected_texts` returned: as many text streams are open at once."""
    count: int = 0
    failures: list[str] = field(default_factory=list)
    sent_again: int = 0
    durations: list[float] = field(default_factory=list)
    """Durations of tensor requests."""
    longest_silence_s: float = 0.0
    """Longest silence of text streams, from the request to the first token and between tokens."""

    @property
    def longest_s(self) -> float:
        return max(self.durations, default=0.0)

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests until `stop`, and wait for the last ones."""
        async with Clients(self.fleet) as clients, asyncio.TaskGroup() as tasks:
            for number, text in enumerate(self.texts):
                tasks.create_task(self._stream(number, text, clients, stop))
            tasks.create_task(self._fill_caches(clients, tasks, stop))
            number = 0
            while not stop.is_set():
                tasks.create_task(self._tensor(number, await clients.get(number), clients))
                number += 1
                await asyncio.sleep(1 / self.per_s)

    async def _tensor(self, number: int, client: Client, clients: Clients) -> None:
        data = number.to_bytes(8, "little") * (_SIZE_BYTES // 8)

        async def send(client: Client) -> None:
            response = await client.infer(echo_request(data), DEADLINE_S)
            assert list(response.raw_output_contents) == [data], "wrong response"

        begun = time.monotonic()
        await self._send(send, client, clients)
        self.durations.append(time.monotonic() - begun)

    async def _fill_caches(self, clients: Clients, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Have workers compute prompts, evict and read them from their tiers. What the model says of them does not matter."""

        async def send(client: Client) -> None:
            prompt = f"{rng.randrange(_CACHED_PROMPTS)} " + "and the same words, many times over; " * 8
            await client.text(text_request(prompt, 2, model=MODEL), Text(), DEADLINE_S)

        rng = Random(1)
        for number in itertools.count():
            if stop.is_set():
                return
            tasks.create_task(self._send(send, await clients.get(number), clients))
            await asyncio.sleep(_CACHED_EVERY_S)

    async def _stream(self, number: int, expected: str, clients: Clients, stop: asyncio.Event) -> None:
        for turn in itertools.count(number):
            if stop.is_set():
                return
            await self._text(number, expected, await clients.get(turn), clients)

    async def _text(self, number: int, expected: str, client: Client, clients: Clients) -> None:
        async def send(client: Client) -> None:
            text = Text()
            try:
                await client.text(_text_request(number), text, DEADLINE_S)
            finally:
                self.longest_silence_s = max(self.longest_silence_s, text.longest_silence_s)
            assert text.text == expected, f"wrong text after {text.messages} messages"

        await self._send(send, client, clients)

    async def _send(self, send: Sending, client: Client, clients: Clients) -> None:
        try:
            try:
                await send(client)
            except grpc.aio.AioRpcError as error:
                other = await clients.other_than(client)
                if not _may_be_resent(error) or other is None:
                    raise
                self.sent_again += 1
                await send(other)
        except grpc.aio.AioRpcError as error:
            self.failures.append(f"{error.code().name}: {error.details()}")
        except AssertionError as error:
            self.failures.append(str(error))
        self.count += 1


def _text_request(number: int) -> bytes:
    return text_request(f"drill {number}", _TOKENS)


def _may_be_resent(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection to a frontend broke or was refused, rather than that the frontend sent an error."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.INTERNAL:
        return details == _NOT_SENT
    return error.code() in _RESENT and not any(word in details for word in ("instance", "worker"))
