"""The workers of a deployment: equal processes, numbered, that may be added and ended while the others serve."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.common.discovery import Instance
from dynamo.local.child import Child
from dynamo.local.config import MAX_WORKERS
from dynamo.local.supervisor import Supervisor

Command = Callable[[str], Sequence[str]]
"""Returns the command of a worker whose process registers under a name."""


class Workers:
    """A stage of the supervisor whose processes are all alike.

    The names under which they register begin with a random word, since other deployments may use the same etcd.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        command: Command,
        count: int,
        logs: Path,
        environment: Mapping[str, str],
        *,
        drain_s: float,
        are_essential: bool = True,
    ) -> None:
        """Start `count` workers. `drain_s`: how long one takes to end at most; then it is killed.

        Without `are_essential`, one that keeps ending does not end the deployment.
        """
        self._supervisor = supervisor
        self._command = command
        self._drain_s = drain_s
        self._word = secrets.token_hex(4)
        self._leaving: set[str] = set()
        names = [f"worker {number + 1}" for number in range(count)]
        commands = {name: self._command_of(name) for name in names}
        self._stage = supervisor.start(commands, logs, environment, is_essential=are_essential)

    def __repr__(self) -> str:
        return f"<Workers {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """Names of the workers that are not being ended, in the order of their start."""
        return [member.name for member in self._stage.members if member.name not in self._leaving]

    def serving(self, registrations: Iterable[Instance]) -> dict[str, list[Instance]]:
        """Return what each worker has registered, by name; not what a process before it has, which has ended."""
        names = {self._process_name(name): name for name in self.names}
        serving: dict[str, list[Instance]] = {}
        for instance in registrations:
            name = names.get(instance.process)
            if name is not None and instance.started_at >= self._started_at(name):
                serving.setdefault(name, []).append(instance)
        return serving

    def add(self) -> str | None:
        """Start a worker and return its name; None if there are as many as there may be, those included that are ending."""
        taken = {member.name for member in self._stage.members}
        if len(taken) >= MAX_WORKERS:
            return None
        name = next(name for number in range(1, MAX_WORKERS + 1) if (name := f"worker {number}") not in taken)
        self._supervisor.add(self._stage, name, self._command_of(name))
        return name

    def end(self, name: str) -> Coroutine[Any, Any, None]:
        """Return what lets a worker finish what it has, and end. It counts as gone from now on."""
        self._leaving.add(name)
        return self._end(name)

    async def _end(self, name: str) -> None:
        await self._supervisor.remove(self._stage, name, self._drain_s)
        self._leaving.discard(name)

    def _started_at(self, name: str) -> float:
        process = self._stage.member(name).process
        return process.started_at if isinstance(process, Child) else 0.0

    def _command_of(self, name: str) -> Sequence[str]:
        return self._command(self._process_name(name))

    def _process_name(self, name: str) -> str:
        return f"{self._word}.{name.replace(' ', '-')}"
