"""Folders on this machine that are made once and shared by all workers: unpacked environments, models of object stores.

An entry is named by a digest of what it holds. It is made beside its place and renamed into it, so that it is there as a whole or
not at all, and one process makes it while the others wait. Locks are `flock`'s, which end with their process:

    <digest>            the entry
    <digest>.lock       held exclusively while the entry is made or removed, and shared while it is used
    <digest>.partial    the entry while it is made; what a process left there that died is removed by the next
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo.common.errors import InvalidRequest

log = logging.getLogger(__name__)

_PARTIAL, _LOCK = ".partial", ".lock"
_SIZE = ".size"
"""A file beside an entry that holds its size in bytes. It is touched when the entry is used."""


class ContentCache:
    """Entries of at most `max_bytes` together, except that those in use stay. All methods block."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"<ContentCache {self._folder}>"

    @contextmanager
    def open(self, digest: str, make: Callable[[Path], None]) -> Iterator[Path]:
        """Yield the entry, which stays until the end of the body. `make` fills it, an empty folder at first, if it is not there.

        Raises InvalidRequest if the cache cannot be used, OSError if it is full, and what `make` raises.
        """
        entry = self._folder / digest
        try:
            self._check_folder()
            lock = os.open(self._folder / f"{digest}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(
                f"the cache folder {self._folder} cannot be written ({error.strerror}): name another with --repository-cache"
            ) from error
        try:
            while True:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if entry.is_dir():
                    break
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not entry.is_dir():
                    self._make(entry, make)
            os.utime(_size_file(entry))
            yield entry
        finally:
            os.close(lock)

    def _check_folder(self) -> None:
        """Make the folder. Raises InvalidRequest if another user could put code into it, OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise InvalidRequest(f"the cache folder {self._folder} must belong to this user, and others must not write to it")

    def _make(self, entry: Path, make: Callable[[Path], None]) -> None:
        partial = entry.with_name(f"{entry.name}{_PARTIAL}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(mode=0o700)
            make(partial)
            size = _bytes_in(partial)
            self._make_room(size)
            _size_file(entry).write_text(str(size))
            partial.rename(entry)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _make_room(self, size: int) -> None:
        """Remove entries that are not in use, least recently used first, until `size` more bytes fit."""
        sizes = self._sizes()
        total = size + sum(held for _, held, _ in sizes)
        for _, held, entry in sizes:
            if total <= self._max_bytes:
                return
            if self._remove(entry):
                total -= held

    def _sizes(self) -> list[tuple[int, int, Path]]:
        """Return when each entry was used, its size and its place, least recently used first."""
        sizes = []
        for file in self._folder.glob(f"*{_SIZE}"):
            try:
                sizes.append((file.stat().st_mtime_ns, int(file.read_text()), file.with_suffix("")))
            except (OSError, ValueError):
                continue  # another process makes or removes it now
        return sorted(sizes)

    def _remove(self, entry: Path) -> bool:
        """Remove an entry. Return False if it is in use."""
        with open(entry.with_name(f"{entry.name}{_LOCK}"), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # Renamed first, since an entry that is removed by half must not be taken for one.
            partial = entry.with_name(f"{entry.name}{_PARTIAL}")
            if entry.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
                entry.rename(partial)
            shutil.rmtree(partial, ignore_errors=True)
            _size_file(entry).unlink(missing_ok=True)
        log.info("%s is removed from the cache", entry)
        return True


def _size_file(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}{_SIZE}")


def _bytes_in(folder: Path) -> int:
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
