"""Tasks with an owner, and that there are no others."""

from __future__ import annotations

import ast
import asyncio
import logging
from pathlib import Path

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.process.background import TaskFailed, Tasks, outlasting, running, running_tasks, start
from tests.support.virtual_time import in_virtual_time

ROOT = Path(__file__).parents[4]
SOURCES = [path for room in ("common", "frontend", "worker", "planner", "local") for path in (ROOT / room).rglob("*.py")]


async def _fail() -> None:
    raise LookupError("the map is upside down")


async def test_a_failure_ends_the_body_and_is_raised_in_place_of_its_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TaskFailed, match="LookupError: the map is upside down"):
        async with running(_fail(), "the cartographer"):
            await asyncio.Event().wait()
    assert [record.getMessage() for record in caplog.records] == ["the cartographer failed"]
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_task_whose_future_was_cancelled_by_others_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with running(wait_for(dropped), "the follower"):
            await asyncio.sleep(0)
            dropped.cancel()
            await asyncio.Event().wait()

    with pytest.raises(TaskFailed, match="something that it awaited was cancelled"):
        await serve()
    assert [record.getMessage() for record in caplog.records] == ["the follower failed"]


async def test_a_task_that_was_cancelled_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()
    tasks.start(asyncio.Event().wait()).cancel()
    await tasks.close()
    assert not caplog.records


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


async def test_the_error_of_the_body_comes_through_as_it_is() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def serve() -> None:
        async with running(work(), "work"):
            await asyncio.sleep(0)
            raise ValueError("the body's own")

    with pytest.raises(ValueError, match="the body's own"):
        await serve()
    assert ended.is_set()


async def test_a_cancelled_body_stays_cancelled() -> None:
    entered = asyncio.Event()

    async def serve() -> None:
        async with running(asyncio.Event().wait(), "work"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(serve())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_body_that_is_cancelled_while_a_task_fails_stays_cancelled() -> None:
    entered = asyncio.Event()
    fail = asyncio.Event()

    async def work() -> None:
        await fail.wait()
        await _fail()

    async def serve() -> None:
        async with running(work(), "work"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(serve())
    await entered.wait()
    fail.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_while_the_body_ends_is_raised() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await _fail()

    with pytest.raises(TaskFailed, match="LookupError: the map is upside down"):
        async with running(work(), "work"):
            await asyncio.sleep(0)


async def test_a_foreseeable_failure_is_raised_as_itself() -> None:
    async def refuse() -> None:
        raise Unavailable("etcd refuses us")

    with pytest.raises(Unavailable, match="etcd refuses us"):
        async with running(refuse(), "lease"):
            await asyncio.Event().wait()


async def test_tasks_that_start_later_end_the_body_as_well() -> None:
    async def serve() -> None:
        async with running_tasks() as tasks:
            tasks.start(asyncio.sleep(0), "first")
            await tasks.finish()
            tasks.start(_fail(), "second")
            await asyncio.Event().wait()

    with pytest.raises(TaskFailed, match="second failed"):
        await serve()


async def test_the_failure_of_an_objects_task_is_logged_once_and_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[tuple[str, str]] = []
    tasks = Tasks(lambda name, error: failures.append((name, str(error))))
    tasks.start(_fail(), "work")
    tasks.start(asyncio.Event().wait(), "wait")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert failures == [("work", "the map is upside down")]
    assert len(tasks) == 1
    await tasks.close()
    assert len(tasks) == 0
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_the_failure_of_a_started_task_is_logged_though_it_is_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    task = start(_fail(), "work")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["work failed"]


@in_virtual_time
@pytest.mark.parametrize(("work_s", "ended_s"), [(2.0, 2.0), (20.0, 4.0)])
async def test_work_that_outlasts_its_caller_ends_or_is_cancelled_in_time(work_s: float, ended_s: float) -> None:
    loop = asyncio.get_running_loop()
    ends: list[tuple[str, float]] = []

    async def work() -> str:
        try:
            await asyncio.sleep(work_s)
        except asyncio.CancelledError:
            ends.append(("cancelled", loop.time() - begin))
            raise
        ends.append(("done", loop.time() - begin))
        return "done"

    begin = loop.time()
    caller = asyncio.create_task(outlasting(work(), 3.0))
    await asyncio.sleep(1.0)
    caller.cancel()
    await asyncio.wait([caller])
    await asyncio.sleep(0)
    assert caller.cancelled() and ends == [("done" if work_s == ended_s else "cancelled", ended_s)]
    assert await outlasting(work(), 3.0) == "done"
    with pytest.raises(LookupError):
        await outlasting(_fail(), 3.0)


_STARTS = ("create_task", "ensure_future")


def _bare_starts(path: Path) -> list[str]:
    """Calls of `create_task` and `ensure_future` on anything but a TaskGroup, as file:line."""
    source = path.read_text()
    if not any(name in source for name in _STARTS):
        return []
    tree = ast.parse(source)
    groups: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and item.optional_vars is not None:
                    groups.add(ast.unparse(item.optional_vars))
        elif isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "asyncio.TaskGroup":
            groups.add(node.arg)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) == "asyncio.TaskGroup()":
            groups.update(map(ast.unparse, node.targets))
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in _STARTS
        and ast.unparse(node.func).rpartition(".")[0] not in groups
    ]


def test_every_task_is_started_by_the_module_that_gives_it_an_owner() -> None:
    bare = [where for path in SOURCES for where in _bare_starts(path)]
    assert [where for where in bare if not where.startswith("common/dynamo/common/process/background.py:")] == []
    assert len(bare) == 1
