"""The simulation itself: a seed is a history, and a broken invariant is found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest import mock

import pytest

from dynamo.common.tensor_request import TensorRequest
from dynamo.frontend.fleet import event_bus
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.router.load import LoadTable
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.echo import EchoTensors
from tests.simulation.__main__ import summary
from tests.simulation.clients import Outcome
from tests.simulation.faults import events_too_many
from tests.simulation.history import Plan, run_history

ROOT = Path(__file__).parents[2]
PLAN = Plan(seconds=5.0, workers=2, frontends=1, faults=0, clients=3)

PAST_FAILURES = "5,15,16,17,18,21,30,32,33,40,51,107,117,128,141,294,379,5110,751925031"
"""Seeds that once broke an invariant."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_summary_says_of_each_outcome_whether_it_is_allowed() -> None:
    lines = summary({outcome.value: count for count, outcome in enumerate(Outcome)})
    assert [line.split()[1] for line in lines] == [outcome.value for outcome in reversed(Outcome)]
    assert {line.split()[1] for line in lines if "not allowed" in line} == {"open", "wrong"}
    assert {line.split()[1] for line in lines if " allowed:" in line and "not allowed" not in line} == {"failed", "lost"}


def test_a_fleet_without_faults_answers_every_request() -> None:
    result = run_history(1, PLAN, [])
    assert result.violations == []
    assert result.outcomes["right"] > 10
    assert "failed" not in result.outcomes


def test_a_frontend_that_cannot_read_all_events_does_without_them_and_serves_on() -> None:
    drops: list[int] = []

    class Counted(EventBus):
        async def watch(self) -> None:
            self.on_dropped(lambda: drops.append(self.drops))
            await super().watch()

    plan = Plan(seconds=15.0, workers=2, frontends=1, faults=3, clients=3)
    with mock.patch.object(event_bus, "EventBus", Counted):
        results = [run_history(seed, plan, [(1.0, events_too_many)]) for seed in range(4)]
    assert drops, "some of them have a router that follows events"
    assert [violation for result in results for violation in result.violations] == []
    assert not any("failed" in result.outcomes for result in results)


def test_a_seed_gives_the_same_history_each_time() -> None:
    first, second = simulate("--replay", "21"), simulate("--replay", "21")
    assert "seed 21" in first.stdout
    assert first.stdout == second.stdout


def corrupted(infer: Callable[..., AsyncIterator[TensorResponse]]) -> Callable[..., AsyncIterator[TensorResponse]]:
    async def wrong(self: EchoTensors, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        async for response in infer(self, request, context):
            yield TensorResponse(response.head, [bytes(len(piece)) for piece in response.raw_outputs])

    return wrong


def test_a_wrong_response_is_found() -> None:
    with mock.patch.object(EchoTensors, "infer", corrupted(EchoTensors.infer)):
        result = run_history(1, PLAN, [])
    assert any(violation.startswith("wrong: ") for violation in result.violations)


def test_a_request_that_is_never_answered_is_found() -> None:
    async def silent(self: EchoTensors, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        await asyncio.Event().wait()
        yield TensorResponse(request.head)  # type: ignore[arg-type]

    with mock.patch.object(EchoTensors, "infer", silent):
        result = run_history(1, PLAN, [])
    assert any(violation.startswith("failed though it could be answered") for violation in result.violations)


def test_a_booking_that_is_never_released_is_found() -> None:
    def keep(self: LoadTable, booking_id: str) -> None: ...

    with mock.patch.object(LoadTable, "finished", keep):
        results = [run_history(seed, PLAN, []) for seed in range(3)]  # one of them at least has a router that books
    assert any("bookings when idle" in violation for result in results for violation in result.violations)


@pytest.mark.timeout(300)
def test_histories_that_once_broke_an_invariant_keep_all_of_them() -> None:
    done = simulate("--seeds", PAST_FAILURES, "--jobs", "1")
    assert done.returncode == 0, done.stdout
