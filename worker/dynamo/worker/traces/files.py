"""The files of traces: one that grows, and numbered ones. Each is a JSON array at every moment."""

from __future__ import annotations

import os
from pathlib import Path


class TraceFiles:
    """The trace files of one instance, which only it writes: their names hold its id. Not for several threads."""

    def __init__(self, path: Path, instance: str, max_bytes: int) -> None:
        """`max_bytes`: of all files together."""
        self.path = path.with_name(f"{path.stem}-{instance}{path.suffix}")
        self._free_bytes = max_bytes
        self._size = 0
        """Of the file that grows."""
        self._numbered = 0

    def __repr__(self) -> str:
        return f"<TraceFiles {self.path}, {self._free_bytes} bytes left>"

    def append(self, traces: str) -> None:
        """Add traces to the file that grows. Raises OSError."""
        data = traces.encode()
        self._take(len(data) + 2)
        descriptor = _open(self.path, os.O_CREAT if self._size else os.O_CREAT | os.O_TRUNC)
        try:
            # The closing bracket is overwritten.
            self._size = max(0, self._size - 1) + _write(descriptor, max(0, self._size - 1), b"," if self._size else b"[", data)
        finally:
            os.close(descriptor)

    def write_numbered(self, traces: str) -> None:
        """Write traces to a new file. Raises OSError."""
        data = traces.encode()
        self._take(len(data) + 2)
        descriptor = _open(self.path.with_name(f"{self.path.name}.{self._numbered}"), os.O_CREAT | os.O_TRUNC)
        try:
            _write(descriptor, 0, b"[", data)
        finally:
            os.close(descriptor)
        self._numbered += 1

    def _take(self, size: int) -> None:
        if size > self._free_bytes:
            raise OSError("the trace files have reached --trace-file-max-bytes")
        self._free_bytes -= size


def _open(path: Path, flags: int) -> int:
    """Open a file for writing. Tensors may be confidential: it is readable by this user only."""
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _write(descriptor: int, offset: int, first: bytes, data: bytes) -> int:
    """Write `first`, `data` and a closing bracket. Return how many bytes that are."""
    with open(descriptor, "wb", closefd=False) as file:
        file.seek(offset)
        return file.write(b"%b%b]" % (first, data))
