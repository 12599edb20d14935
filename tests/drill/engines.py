"""Requests that make a model raise, hang or end its process, and the errors that their callers get."""

from __future__ import annotations

import asyncio
import signal

import grpc

from tests.drill.fleet import DrilledFleet
from tests.drill.model import HANG_S, Fault
from tests.support.fleet import Client, connect, echo_request
from tests.support.waiting import WAIT_S, expiring

_RAISING = 100
_HANGING = 12
_HANG_DEADLINE_S = 2.0


class UnexpectedResponse(Exception):
    """A request got another response than its fault must have."""


async def raises(fleet: DrilledFleet) -> None:
    async with connect(fleet.frontends[0].target) as client:
        for _ in range(_RAISING):
            await _expect(client, Fault.RAISE, grpc.StatusCode.INTERNAL)


async def hangs(fleet: DrilledFleet) -> None:
    """The requests end at their deadline; their threads later."""
    async with connect(fleet.frontends[0].target) as client, asyncio.TaskGroup() as tasks:
        for _ in range(_HANGING):
            tasks.create_task(_expect(client, Fault.HANG, grpc.StatusCode.DEADLINE_EXCEEDED, expiring(_HANG_DEADLINE_S)))
    await asyncio.sleep(HANG_S)


async def ends(fleet: DrilledFleet) -> None:
    """The request is tried once more, so it ends two workers, and no third one."""
    async with connect(fleet.frontends[0].target) as client:
        await _expect(client, Fault.ABORT, grpc.StatusCode.INTERNAL)
    statuses = [worker.process.process.returncode for worker in fleet.workers]
    if statuses.count(-signal.SIGABRT) > 2 or any(status not in (None, -signal.SIGABRT) for status in statuses):
        raise UnexpectedResponse(f"one request ended the workers with {statuses}")
    for number, status in enumerate(statuses):
        if status is not None:
            await fleet.replace_worker(number)


async def _expect(client: Client, fault: Fault, expected: grpc.StatusCode, timeout_s: float = WAIT_S) -> None:
    try:
        await client.infer(echo_request(model="faulty", fault=fault), timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is expected:
            return
        raise UnexpectedResponse(f"{error.code().name}: {error.details()}, not {expected.name}") from error
    raise UnexpectedResponse(f"a response, not {expected.name}")
