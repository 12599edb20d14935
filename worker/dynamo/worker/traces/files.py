"""The files of traces: one that grows, and numbered ones. Each holds a JSON array whenever traces have been written."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 4096
"""What a file takes of the disk, at least."""


class TraceFiles:
    """The trace files of one instance, which only it writes: their names hold its id. Not for several threads."""

    def __init__(self, path: Path, instance: str, max_bytes: int) -> None:
        """`max_bytes`: of all files together."""
        self.path = path.with_name(f"{path.stem}-{instance}{path.suffix}")
        self._free_bytes = max_bytes
        self._size = 0
        """Size of the file that grows."""
        self._numbered = 0

    def __repr__(self) -> str:
        return f"<TraceFiles {self.path}, {self._free_bytes} bytes left>"

    def append(self, traces: str) -> None:
        """Add traces to the file that grows. Raises OSError."""
        if not self._size:
            self._size = self._create(self.path, traces, least=0)
            return
        data = f",{traces}]".encode()
        self._take(len(data))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.lseek(descriptor, self._size - 1, os.SEEK_SET)  # the closing bracket is overwritten
            _write_all(descriptor, data)
        finally:
            os.close(descriptor)
        self._size += len(data) - 1

    def write_numbered(self, traces: str) -> None:
        """Write traces to a new file. Raises OSError."""
        self._create(self.path.with_name(f"{self.path.name}.{self._numbered}"), traces, least=_BLOCK_BYTES)
        self._numbered += 1

    def _create(self, path: Path, traces: str, *, least: int) -> int:
        """Create a file, which has its name when it is complete and counts as `least` bytes or more. Return its size."""
        data = f"[{traces}]".encode()
        self._take(max(least, len(data)))
        unfinished = path.with_name(f".{path.name}")
        # Tensors may be confidential: the file is readable by this user only.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, data)
        finally:
            os.close(descriptor)
        unfinished.replace(path)
        return len(data)

    def _take(self, size: int) -> None:
        if size > self._free_bytes:
            raise OSError("the trace files have reached --trace-file-max-bytes")
        self._free_bytes -= size


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
