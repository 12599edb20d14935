"""Clients that behave badly: they leave, do not read, or send more than the fleet can take."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing

import grpc

from tests.drill.fleet import DrilledFleet
from tests.support.fleet import Client, connect, echo_request, text_request

_LEAVING = 50
_STALLING = 10
_STALL_S = 8.0
_AT_ONCE = 400
_FLOOD_S = 6.0
DELAY_S = 1.0
"""How long a request of the flood keeps its place at the worker."""
_PAUSE_S = 0.25


async def leave(fleet: DrilledFleet) -> None:
    """Streams whose caller cancels after a few tokens."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(frontend.target)) for frontend in fleet.frontends]
        async with asyncio.TaskGroup() as tasks:
            for number in range(_LEAVING):
                tasks.create_task(_read_some(clients[number % len(clients)], number))


async def _read_some(client: Client, number: int) -> None:
    async with aclosing(client.stream([text_request(f"leaving {number}", 2000)])) as messages:
        for _ in range(5):
            await anext(messages)


async def stall(fleet: DrilledFleet) -> None:
    """Streams of large responses whose callers read nothing for a while, and leave before the end."""
    request = echo_request(bytes(256 * 1024), model="stream")
    async with AsyncExitStack() as stack:
        for number in range(_STALLING):
            client = await stack.enter_async_context(connect(fleet.frontends[number % len(fleet.frontends)].target))
            messages = await stack.enter_async_context(aclosing(client.stream([request])))
            await anext(messages)
        await asyncio.sleep(_STALL_S)


async def flood(fleet: DrilledFleet) -> None:
    """More requests at once than the workers take; those that are refused come back a moment later."""
    until = time.monotonic() + _FLOOD_S
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(frontend.target)) for frontend in fleet.frontends]
        async with asyncio.TaskGroup() as tasks:
            for number in range(_AT_ONCE):
                tasks.create_task(_insist(clients[number % len(clients)], until))


async def _insist(client: Client, until: float) -> None:
    request = echo_request(delay_ms=int(DELAY_S * 1000))
    while time.monotonic() < until:
        try:
            await client.infer(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(_PAUSE_S)
