"""A child process with a log file.

It runs in a session of its own, so that Ctrl-C in a terminal reaches only us and the children stop last; and the kernel
ends it when this process dies without stopping it, so that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dynamo.common.errors import DynamoError

_LOG_TAIL_LINES = 30
_LOG_TAIL_BYTES = 16_384

# Runs in a fresh interpreter and not as `preexec_fn`, which would fork a process that has threads (gRPC's) in it.
_LAUNCH = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerFailed(DynamoError):
    """A server process ended, or was not ready in time. The message holds the end of its log."""


class Child:
    """A process and its log. It may be started again after it ended."""

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self.started_at = 0.0
        """When the current process was started: Unix time, seconds."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        """Whether the current process was sent SIGTERM: a second one would end it at once."""
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Id of the current process, 0 if none was started."""
        return self._process.pid if self._process else 0

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process, by default with this process's environment."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._is_stopping = False
            self.started_at = time.time()
            self._process = _spawn(command, log, environment)

    def log(self) -> str:
        """Return the last part of what the current process has logged."""
        try:
            with self.log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
                return log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def failure(self, what: str) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-_LOG_TAIL_LINES:])
        return ServerFailed(f"{what}; its log {self.log_file} ends with:\n{tail}")

    async def exited(self) -> int:
        """Waits for the end of the process; returns its exit code, negative for a signal."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            await _readable(os.pidfd_open(process.pid))
        return process.wait()

    def kill(self) -> None:
        """SIGKILL, and waits for it, which takes milliseconds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when that has not helped in time. One that is stopping already is waited for."""
        if self._process is None:
            return
        if self.is_running and not self._is_stopping:
            self._is_stopping = True
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.exited()
        except TimeoutError:
            self.kill()


def _spawn(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
    return subprocess.Popen(  # noqa: S603 - our own binaries and flags
        launch, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
    )


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
