"""The simulation itself: a seed is a history, and a broken invariant is found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.openai.batches import runner
from dynamo.frontend.api.openai.batches.batch import BatchLine
from dynamo.frontend.api.openai.batches.files import FileObject, Files
from dynamo.frontend.api.openai.batches.result_lines import result_line
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.security.accounts import KeyAccount
from dynamo.frontend.security.ledger import Ledger, UsageCounts
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.echo import EchoTensors
from tests.simulation import process
from tests.simulation.__main__ import summary
from tests.simulation.clients import Outcome
from tests.simulation.faults import etcd_without_quorum, events_too_many
from tests.simulation.history import Plan, run_history
from tests.simulation.milestones import MILESTONES, SURFACES, Census, Reached
from tests.simulation.stores import LIMITED

ROOT = Path(__file__).parents[2]
PLAN = Plan(seconds=5.0, workers=2, frontends=1, faults=0, clients=3)

PAST_FAILURES = "5,15,16,17,18,21,30,32,33,40,51,107,117,128,141,294,379,5110,751925031"
"""Seeds that once broke an invariant, of histories as they were before there were milestones."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_summary_says_of_each_outcome_whether_it_is_allowed() -> None:
    lines = summary({outcome.value: count for count, outcome in enumerate(Outcome)})
    assert [line.split()[1] for line in lines] == [outcome.value for outcome in reversed(Outcome)]
    assert {line.split()[1] for line in lines if "not allowed" in line} == {"open", "wrong"}
    assert {line.split()[1] for line in lines if " allowed:" in line and "not allowed" not in line} == {"failed", "lost"}


def test_so_many_histories_as_have_to_be_run_are_and_fewer_are_a_failure() -> None:
    done = simulate("--seeds", "0", "--within-s", "0", "--at-least", "2", "--plain")
    assert done.stdout.startswith("1 seeds, ")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "too few: 1 histories of at least 2")


def test_the_table_says_what_was_never_reached() -> None:
    census = Census()
    census.add({"moved": 2})
    census.add({"moved": 1, "a name of another version": 1})
    table = census.table()
    line = next(line for line in table if " moved " in line)
    assert line.split()[:2] == ["3", "2"]
    never = table[table.index("never reached:") :]
    assert len(never) == len(MILESTONES), "a title, and all but one"


def test_a_milestone_is_overdue_once_as_many_histories_as_always_reach_it_did_not() -> None:
    expected = [each for each in MILESTONES.values() if each.within is not None]
    assert len(expected) >= 20
    first = min(expected, key=lambda each: each.within or 0)
    assert first.within is not None
    census = Census()
    for _ in range(first.within - 1):
        census.add({})
    assert census.overdue() == []
    census.add({})
    assert first in census.overdue()
    census.add({each.name: 1 for each in expected})
    assert census.overdue() == []


def test_milestones_have_distinct_names_and_only_these_are_reached() -> None:
    assert sum(map(len, SURFACES.values())) == len(MILESTONES)
    with pytest.raises(KeyError):
        Reached()("killed-in-a-dream")


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
    with mock.patch.object(process, "EventBus", Counted):
        results = [run_history(seed, plan, [(1.0, events_too_many)]) for seed in range(4)]
    assert drops, "some of them have a router that follows events"
    assert [violation for result in results for violation in result.violations] == []
    assert not any("failed" in result.outcomes for result in results)


def test_leases_that_expire_while_etcd_has_no_quorum_fail_no_request() -> None:
    plan = Plan(seconds=60.0, workers=2, frontends=1, faults=3, clients=3)
    results = [run_history(seed, plan, [(1.0, etcd_without_quorum)]) for seed in range(3)]
    assert [violation for result in results for violation in result.violations] == []


@pytest.mark.slow
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


STORES = Plan(seconds=10.0, workers=2, frontends=2, faults=0, clients=3, stores=True)


def test_what_was_acknowledged_is_kept_and_counted() -> None:
    result = run_history(1, STORES, [])
    assert result.violations == []
    assert {"file-kept", "batch-complete", "response-complete", "ledger-exact", "limit-refused"} <= result.milestones.keys()


def test_a_file_that_is_lost_is_found() -> None:
    async def forget(self: Files, owner: str, id: str, *arguments: Any) -> FileObject:
        return FileObject(id=id, bytes=0, created_at=0, filename="", purpose="")

    with mock.patch.object(Files, "put", forget):
        result = run_history(1, STORES, [])
    assert any("was acknowledged, and is gone" in violation for violation in result.violations)


def test_a_line_of_a_batch_that_is_there_twice_is_found() -> None:
    def twice(batch: str, line: BatchLine, response: tuple[int, bytes] | None, code: str = "") -> bytes:
        return 2 * result_line(batch, line, response, code)

    with mock.patch.object(runner, "result_line", twice):
        result = run_history(1, STORES, [])
    assert any("its results are of the lines" in violation for violation in result.violations)


def test_a_response_in_the_background_that_is_given_up_is_found() -> None:
    async def give_up(self: BackgroundResponses, owner: str, response: ResponseObject, revision: int) -> None: ...

    with mock.patch.object(BackgroundResponses, "_write", give_up):
        result = run_history(1, STORES, [])
    assert any("failed though all was well" in violation for violation in result.violations)


def test_tokens_that_are_counted_twice_are_found() -> None:
    add = Ledger.add

    def add_twice(self: Ledger, key: str, model: str, usage: UsageCounts) -> None:
        add(self, key, model, usage)
        add(self, key, model, usage)

    with mock.patch.object(Ledger, "add", add_twice):
        result = run_history(1, STORES, [])
    assert any("were delivered" in violation for violation in result.violations)


def test_limits_that_do_not_hold_are_found() -> None:
    def ignore(self: KeyAccount, *arguments: Any) -> None: ...

    many = Plan(seconds=10.0, workers=2, frontends=1, faults=0, clients=15, stores=True)
    with mock.patch.object(KeyAccount, "_check_rate", ignore), mock.patch.object(KeyAccount, "_check_concurrency", ignore):
        result = run_history(1, many, [])
    assert any(f"requests of {LIMITED} were served" in violation for violation in result.violations)


@pytest.mark.slow
def test_histories_that_once_broke_an_invariant_keep_all_of_them() -> None:
    done = simulate("--seeds", PAST_FAILURES, "--plain", "--jobs", "1")
    assert done.returncode == 0, done.stdout
