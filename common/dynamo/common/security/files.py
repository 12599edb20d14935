"""Values that are read again when their files change, so that keys and certificates are renewed without a restart."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from dynamo.common.config import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"

_LOOK_AGAIN_S = 1.0
"""Files that were written within this time are not read before the next look: more may be written."""


class Watched(Generic[T]):
    """A value that is read from files. `current` looks at the files at most once a second; nothing runs in between.

    Files that have changed are read when they are the same at two looks, or were last written more than a second ago. Files that
    become unreadable while the process runs (one half of a certificate and its key was replaced, a typing error) are logged and
    change nothing. Those that the system does not let the process read (it has no file descriptor or memory left, or no
    permission) are read again at each look. Safe to use from several threads.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[str | Path],
        read: Callable[[], T],
        *,
        check: Callable[[T, T], None] = lambda before, after: None,
        run: Callable[[Callable[[], None]], object] = lambda read: read(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files at once. `what` names the files in the log; `read` raises ConfigError.

        `check` raises ConfigError for a value, its second argument, that may not take the place of the one before. `run` calls
        the function that reads files which have changed: `in_thread` if that takes long.
        """
        self._what = what
        self._paths = paths
        self._read = read
        self._check = check
        self._run = run
        self._is_reading = False
        self._refusal = ""
        """Why the system did not let the files be read the last time."""
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: _Stamp | None
        """The stamp of the files that were read last; None: read them again, whether or not they change."""
        self._stamp = self._looked = self._look()  # before reading, so that a change in between is noticed next time
        self._value = read()
        self._looked_at = clock()

    def __repr__(self) -> str:
        return f"<Watched {self._what}>"  # the value may be a secret

    def current(self) -> T:
        """Return the newest value that could be read."""
        now = self._clock()
        if now - self._looked_at >= _LOOK_AGAIN_S:
            with self._lock:
                self._renew(now)
        return self._value

    def _renew(self, now: float) -> None:
        if self._is_reading or now - self._looked_at < _LOOK_AGAIN_S:  # another thread has just looked
            return
        self._looked_at = now
        before, self._looked = self._looked, self._look()
        if self._looked == self._stamp or (self._looked != before and _is_recent(self._looked)):
            return
        self._stamp = self._looked
        self._is_reading = True
        self._run(self._read_again)

    def _read_again(self) -> None:
        refusal = ""
        try:
            value = self._read()
            self._check(self._value, value)
            self._value = value
        except (ConfigError, MemoryError) as error:
            why = str(error) or "no memory is left"
            if _is_by_the_system(error):
                refusal, self._stamp = why, None
            if not refusal or refusal != self._refusal:  # which would be logged once a second
                log.error("%s changed and cannot be used, so the old one stays: %s", self._what, why)
        else:
            log.info("%s changed and was read again", self._what)
        finally:
            self._refusal = refusal
            self._is_reading = False

    def _look(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def in_thread(read: Callable[[], None]) -> None:
    """Call `read` beside the event loop."""
    try:
        threading.Thread(target=read, name="files that changed", daemon=True).start()
    except RuntimeError:  # there may be no more threads now
        read()


def _is_by_the_system(error: ConfigError | MemoryError) -> bool:
    """Return whether the same files may be readable later, and not only others."""
    cause = error.__cause__
    return isinstance(error, MemoryError) or (isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError))


def _is_recent(stamp: _Stamp) -> bool:
    """Return whether a file may still be being written or replaced: it was written a moment ago, or is missing."""
    return any(file is None or file[0] > (time.time() - _LOOK_AGAIN_S) * 1e9 for file in stamp)


def _stamp(path: str | Path) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat()  # follows links, by which Kubernetes replaces mounted secrets
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
