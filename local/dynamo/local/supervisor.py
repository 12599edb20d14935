"""The processes of a deployment: started in stages, watched, and stopped stage by stage in the reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from dynamo.common.background import awaited, start
from dynamo.common.errors import DynamoError
from dynamo.local.child import Child
from dynamo.local.servers import Server

T = TypeVar("T")
Report = Callable[[str], None]
Process = Child | Server

_LOG_TAIL_LINES = 30


class ChildDied(DynamoError):
    """A process ended by itself. The message holds the end of its log."""


class Supervisor:
    """Knows every process, and notices one that ends by itself."""

    def __init__(self, report: Report, stop_timeout_s: float) -> None:
        self._report = report
        self._stop_timeout_s = stop_timeout_s
        self._stages: list[dict[str, Process]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[ChildDied] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Supervisor of {', '.join(name for stage in self._stages for name in stage)}>"

    async def start_server(self, name: str, server: Server) -> None:
        """Start a server as a stage of its own. Returns when it is ready; raises ServerFailed."""
        await self.unless_died(server.start())
        self._add({name: server})

    def start(
        self, commands: Mapping[str, Sequence[str]], log_folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a stage of processes that run side by side, each with a log file of its own."""
        stage: dict[str, Process] = {}
        for name, command in commands.items():
            child = Child(log_folder / f"{name.replace(' ', '-')}.log")
            child.start(command, environment)
            stage[name] = child
        self._add(stage)

    async def unless_died(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises ChildDied as soon as one of the processes ends by itself."""
        task = awaited(work)
        either: set[asyncio.Future[Any]] = {task, self._died}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._died.done():
                raise self._died.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def stop(self) -> None:
        """Stop the last stage first, then the one before it: SIGTERM, and SIGKILL to processes that take too long."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        while self._stages:
            stage = self._stages[-1]
            running = [name for name, process in stage.items() if process.is_running]
            if running:
                self._report(f"stopping {', '.join(running)}")
            await asyncio.gather(*(process.stop(self._stop_timeout_s) for process in stage.values()))
            self._stages.pop()

    def kill(self) -> None:
        """Send SIGKILL to all processes, the last stage first."""
        for stage in reversed(self._stages):
            for process in stage.values():
                process.kill()

    def _add(self, stage: dict[str, Process]) -> None:
        self._stages.append(stage)
        self._watchers += [start(self._watch(name, process), f"watch of {name}") for name, process in stage.items()]

    async def _watch(self, name: str, process: Process) -> None:
        code = await process.exited()
        tail = "\n".join(process.log().splitlines()[-_LOG_TAIL_LINES:])
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        if not self._died.done():
            self._died.set_result(ChildDied(f"{name} {how}; its log {process.log_file} ends with:\n{tail}"))


@asynccontextmanager
async def open_supervisor(report: Report, stop_timeout_s: float) -> AsyncIterator[Supervisor]:
    """Stop everything at the end, in order; a cancelled or failed stop kills the rest."""
    supervisor = Supervisor(report, stop_timeout_s)
    try:
        yield supervisor
    finally:
        try:
            await supervisor.stop()
        finally:
            supervisor.kill()
