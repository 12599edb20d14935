"""Shell commands with a bound, each in a process group of its own, which ends with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from tests.support.waiting import expiring

_TERM_S = expiring(20.0)
"""Seconds that a command has to end by itself after SIGTERM."""
_NOT_PASSED_ON = frozenset(
    {
        "FLAGS",
        "KILLS",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "PYTEST_ADDOPTS",
        "PYTEST_FLAGS",
        "SEEDS",
        "TESTS",
        "VLLM_FLAGS",
        "VLLM_TESTS",
    }
)
"""Variables by which `make`, its recipes and pytest would run less than all. A shell in which one was exported proves nothing."""
_BACKGROUND = ("nice", "-n", "19", *(("ionice", "-c", "idle") if shutil.which("ionice") else ()))


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and what it printed."""

    status: int | None
    """Its exit status; None if it hung and was killed."""
    output: str


class Commands:
    """Runs commands, from any thread. When it is closed it ends those that still run, and starts none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for process in running:
            _end(process)

    def run(self, command: str, limit_s: float, env: Mapping[str, str] | None = None, *, in_background: bool = False) -> Finished:
        """Run a command in Bash. One in the background yields processor and disk to others, and its output is not shown."""
        with self._lock:
            if self._is_closed:
                return Finished(None, "the gate has ended")
            process = subprocess.Popen(
                [*(_BACKGROUND if in_background else ()), "bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON} | dict(env or {}),
                start_new_session=True,
            )
            self._running.add(process)
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines, not in_background), daemon=True)
        reader.start()
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        _end(process)
        reader.join(_TERM_S)  # a process that left the group may still hold the pipe
        with self._lock:
            self._running.discard(process)
        return Finished(status, "".join(lines))


def _read(stream: IO[str], lines: list[str], is_shown: bool) -> None:
    for line in stream:
        lines.append(line)
        if is_shown:
            sys.stdout.write(line)
            sys.stdout.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it has started, which may outlive it."""
    for each in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, each)
        except ProcessLookupError:
            return
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            continue
