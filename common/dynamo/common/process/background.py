"""Tasks with an owner. Everything that runs beside a function is started here, in one of these ways:

| way | for | its failure |
|---|---|---|
| `running(work, name)` | work that lasts as long as the body of an `async with` | is logged, ends the body and is raised |
| `running_tasks()` | any number of tasks that start and end during the body | is logged, ends the body and is raised |
| `Tasks(on_failure)` | tasks of an object that has a `close()` | is logged, and given to `on_failure` |
| `start(work, name)` | one such task | is logged |
| `awaited(work, name)` | a task that the function which starts it awaits as well | is raised by awaiting |
| `outlasting(work, grace_s)` | what goes on for a while when its caller is cancelled | is raised, unless that was cancelled |

`asyncio.TaskGroup` is fine inside a function. A test forbids bare `create_task` and `ensure_future` everywhere else.

Tasks handle what can be foreseen: an error that reaches this module is a defect. The processes enter `running` and
`running_tasks` in their main task, so such an error ends them in order, with a sentence (`lifecycle.run`), rather than leave
them half alive. A task that ends as cancelled although no call cancelled it has failed, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from dynamo.common.errors import DynamoError

log = logging.getLogger(__name__)

T = TypeVar("T")
Work: TypeAlias = Coroutine[Any, Any, T] | Generator[Any, Any, T]
OnFailure: TypeAlias = Callable[[str, BaseException], None]
"""Called with the task's name and its failure."""


class CancelledByOthers(Exception):
    """A task ended as if it were cancelled, and it was not: what it awaited was, as by a library that drops its futures."""


class TaskFailed(Exception):
    """A task failed in a way that it does not handle. It has been logged; `str()` is a sentence for the operator."""


def awaited(work: Work[T], name: str | None = None) -> asyncio.Task[T]:
    """Start `work` beside the calling function, which awaits the task or hands it to an awaiter, and so gets its failure."""
    return asyncio.get_running_loop().create_task(work, name=name)


async def outlasting(work: Work[T], grace_s: float) -> T:
    """Return what `work` does. If the calling task is cancelled, `work` has so many more seconds before that is raised."""
    task = awaited(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=grace_s)
        raise
    finally:
        task.cancel()


def start(work: Work[T], name: str) -> asyncio.Task[T]:
    """Start `work` for an object that keeps the task and cancels it in its `close`. If it fails, that is logged once."""
    task: asyncio.Task[T] = awaited(work, name)

    def ended(task: asyncio.Task[T]) -> None:
        if (error := _failure(task)) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    task.add_done_callback(ended)
    return task


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    """Return why a task failed; None if it has ended as it should, or was cancelled."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else CancelledByOthers("something that it awaited was cancelled")


def raise_if_cancelled() -> None:
    """Cancel the current task again if it was cancelled: for after a library that may have lost that.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that comes together with the result that it waits for, and gRPC
    one that comes together with the failure of a call.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Tasks:
    """Tasks of one object. A failure is logged once and given to `on_failure`, if there is one."""

    def __init__(self, on_failure: OnFailure | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps weak references only

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def start(self, work: Work[T], name: str | None = None) -> asyncio.Task[T]:
        """Start `work`. The task is kept until it ends."""
        task = awaited(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if (task.cancelled() or task.exception() is not None) and (error := _failure(task)) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            if self._on_failure is not None:
                self._on_failure(task.get_name(), error)

    async def finish(self) -> None:
        """Return when all tasks have ended, those included that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self)

    async def close(self) -> None:
        """Cancel all tasks and return when they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.finish()


@asynccontextmanager
async def running_tasks() -> AsyncIterator[Tasks]:
    """Tasks that run beside the body and are cancelled at its end.

    If one fails, the body is cancelled, and the failure is raised in place of the cancellation: a DynamoError as it is, any
    other as the cause of TaskFailed. The body's own error comes through as it is; a TaskGroup would wrap it.
    """
    body = asyncio.current_task()
    failures: list[tuple[str, BaseException]] = []
    has_ended = False

    def end_body(name: str, error: BaseException) -> None:
        failures.append((name, error))
        if body is not None and not has_ended and len(failures) == 1:
            body.cancel()

    tasks = Tasks(end_body)
    try:
        yield tasks
    except asyncio.CancelledError:
        if not failures or body is None or body.uncancel() > 0:
            raise
    finally:
        has_ended = True
        await tasks.close()
    if failures:
        name, error = failures[0]
        if isinstance(error, DynamoError):
            raise error
        raise TaskFailed(f"{name} failed: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def running(work: Work[object], name: str) -> AsyncIterator[None]:
    """Run `work` beside the body and cancel it at the end. Its failure ends the body, as with `running_tasks`."""
    async with running_tasks() as tasks:
        tasks.start(work, name)
        yield
