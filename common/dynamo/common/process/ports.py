"""Ports that are free and stay this process's own until a server binds them, which may be long after they were chosen."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from functools import cache
from pathlib import Path

from dynamo.common.errors import Unsupported

_HOST = "127.0.0.1"
_LEAST = 1_024
_MOST_CANDIDATES = 16_000
_TRIES = 1_000
_MOST_KEPT = 2_000
_DEFAULT_EPHEMERAL = 32_768
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return `count` ports, each as `first_of_free_ports` finds it. Raises Unsupported."""
    return [_of_this_process().draw() for _ in range(count)]


def first_of_free_ports(wanted: int) -> int:
    """Return the first of `wanted` consecutive ports that are free. Raises Unsupported if there are none.

    They lie below the range from which the system draws ports of outgoing connections: otherwise a client that reconnects while
    a server is down can be given that very port, and the server cannot come back. No other process of this user, on this
    machine and with the same folder for temporary files, draws them while this one runs, as it keeps its last 2,000.
    """
    return _of_this_process().draw(wanted)


class Ports:
    """Draws ports and keeps them: each is a locked byte of one file, which the system unlocks when the process ends."""

    def __init__(self, file: Path, candidates: range, most_kept: int = _MOST_KEPT) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._candidates = candidates
        self._most_kept = most_kept
        self._kept: deque[int] = deque()

    def draw(self, wanted: int = 1) -> int:
        """Return the first of `wanted` ports in a row, and give back the oldest of those kept. Raises Unsupported."""
        starts = self._candidates[: len(self._candidates) - wanted + 1]
        for start in random.choices(starts, k=_TRIES) if starts else ():
            ports = range(start, start + wanted)
            if all(map(self._hold, ports)):
                self._kept.extend(ports)
                while len(self._kept) > self._most_kept:
                    self._free(self._kept.popleft())
                return start
            for port in set(ports).difference(self._kept):
                self._free(port)
        raise Unsupported(f"no {wanted} free ports in a row were found among {self._candidates[0]} to {self._candidates[-1]}")

    def _hold(self, port: int) -> bool:
        if port in self._kept:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind((_HOST, port))
        except OSError:  # another process holds it, or a server listens on it
            return False
        return True

    def _free(self, port: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, port)


@cache
def _of_this_process() -> Ports:
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else _DEFAULT_EPHEMERAL
    candidates = range(max(_LEAST, end - _MOST_CANDIDATES), max(end, _LEAST + 1_000))
    return Ports(Path(tempfile.gettempdir(), f"dynamo-ports-{os.getuid()}"), candidates)
