"""The processes of a deployment: started in stages, restarted when they end, and stopped stage by stage in the reverse order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dynamo.common.config import EXIT_CONFIG
from dynamo.common.errors import DynamoError
from dynamo.common.process.background import awaited, start
from dynamo.local.child import Child, ServerFailed
from dynamo.local.servers import Server

T = TypeVar("T")
Report = Callable[[str], None]
Process = Child | Server

_LOG_TAIL_LINES = 30


class ChildDied(DynamoError):
    """A process ended by itself and is not restarted. The message holds the end of its log."""


class Restarts:
    """Decides when a process that ended is started again: later each time, and not at all when it keeps ending at once."""

    SHORT_RUN_S = 10.0
    MAX_SHORT_RUNS = 5
    FIRST_PAUSE_S = 0.5

    def __init__(self) -> None:
        self._short_runs = 0

    def pause_s(self, ran_s: float) -> float | None:
        """Return the pause before the next start after a run of `ran_s`; None: too many runs one after the other were short."""
        self._short_runs = self._short_runs + 1 if ran_s < self.SHORT_RUN_S else 0
        if self._short_runs == self.MAX_SHORT_RUNS:
            return None
        return self.FIRST_PAUSE_S * 2.0**self._short_runs


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """One process of a stage."""

    name: str
    process: Process
    start: Callable[[], Awaitable[None]]
    """Start the process again. Raises ServerFailed."""
    is_essential: bool = True
    """Whether the deployment ends when this process keeps ending."""


class Stage:
    """Processes that run side by side, each with a log file of its own."""

    def __init__(self, log_folder: Path, environment: Mapping[str, str] | None, *, is_essential: bool = True) -> None:
        self.members: list[_Member] = []
        """In the order of their start, those included that are being ended."""
        self._log_folder = log_folder
        self._environment = environment
        self._is_essential = is_essential

    def start(self, name: str, command: Sequence[str]) -> _Member:
        """Start a process and return it."""
        child = Child(self._log_folder / f"{name.replace(' ', '-')}.log")

        async def start_again() -> None:
            child.start(command, self._environment)

        child.start(command, self._environment)
        member = _Member(name, child, start_again, self._is_essential)
        self.members.append(member)
        return member

    def member(self, name: str) -> _Member:
        return next(member for member in self.members if member.name == name)


class Supervisor:
    """Knows every process. The end of one ends the deployment while it starts; from `keep_running` on it is restarted."""

    def __init__(self, report: Report, stop_timeout_s: float) -> None:
        self._report = report
        self._stop_timeout_s = stop_timeout_s
        self._stages: list[Stage] = []
        self._watchers: dict[_Member, asyncio.Task[None]] = {}
        self._keeps_running = False
        self._died: asyncio.Future[ChildDied] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Supervisor of {', '.join(member.name for stage in self._stages for member in stage.members)}>"

    async def start_server(self, name: str, server: Server) -> None:
        """Start a server as a stage of its own. Returns when it is ready; raises ServerFailed."""
        await self.unless_died(server.start())
        stage = Stage(server.log_file.parent, None)
        stage.members.append(_Member(name, server, server.start))
        self._stages.append(stage)
        self._watch_over(stage.members[0])

    def start(
        self,
        commands: Mapping[str, Sequence[str]],
        log_folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        is_essential: bool = True,
    ) -> Stage:
        """Start a stage of processes. Without `is_essential` the deployment goes on when one of them keeps ending."""
        stage = Stage(log_folder, environment, is_essential=is_essential)
        self._stages.append(stage)
        for name, command in commands.items():
            self.add(stage, name, command)
        return stage

    def add(self, stage: Stage, name: str, command: Sequence[str]) -> None:
        """Start one more process of a stage."""
        self._watch_over(stage.start(name, command))

    async def remove(self, stage: Stage, name: str, timeout_s: float) -> None:
        """End a process of a stage for good: SIGTERM, and SIGKILL after the timeout. Returns when it has ended.

        If this is cancelled, the process is ending, and `stop` waits for it.
        """
        member = stage.member(name)
        if (watcher := self._watchers.pop(member, None)) is not None:
            watcher.cancel()  # so that it is not started again
            await asyncio.wait({watcher})
        await member.process.stop(timeout_s)
        stage.members.remove(member)

    def keep_running(self) -> None:
        """From now on restart a process that ends, unless it keeps ending at once or cannot use its configuration."""
        self._keeps_running = True

    async def unless_died(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises ChildDied as soon as a process has ended by itself and is not restarted."""
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
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        while self._stages:
            stage = self._stages[-1].members
            running = [member.name for member in stage if member.process.is_running]
            if running:
                self._report(f"stopping {', '.join(running)}")
            await asyncio.gather(*(member.process.stop(self._stop_timeout_s) for member in stage))
            self._stages.pop()

    def kill(self) -> None:
        """Send SIGKILL to all processes, the last stage first."""
        for stage in reversed(self._stages):
            for member in stage.members:
                member.process.kill()

    def _watch_over(self, member: _Member) -> None:
        self._watchers[member] = start(self._watch(member), f"watch of {member.name}")

    async def _watch(self, member: _Member) -> None:
        restarts = Restarts()
        while True:
            begun = time.monotonic()
            code = await member.process.exited()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            if not self._keeps_running or code == EXIT_CONFIG:  # which no restart mends
                return self._give_up(member, how)
            pause_s = restarts.pause_s(time.monotonic() - begun)
            if pause_s is None:
                return self._give_up(member, f"{how} {Restarts.MAX_SHORT_RUNS} times, each soon after its start")
            self._report(f"{member.name} {how}; it is restarted in {pause_s:g} s, its log is {member.process.log_file}")
            await asyncio.sleep(pause_s)
            try:
                await member.start()
            except ServerFailed:
                continue  # it has ended, which counts as one more short run
            self._report(f"{member.name} was restarted")

    def _give_up(self, member: _Member, how: str) -> None:
        tail = "\n".join(member.process.log().splitlines()[-_LOG_TAIL_LINES:])
        why = f"{member.name} {how}; its log {member.process.log_file} ends with:\n{tail}"
        if self._keeps_running and not member.is_essential:
            self._report(f"{why}\n  The deployment goes on without it.")
        elif not self._died.done():
            self._died.set_result(ChildDied(why))


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
