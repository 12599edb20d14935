"""Files of arenas: how they are created, opened, checked and removed.

A file that can be seen belongs to a live process, or to one that died: its owner holds an exclusive `flock` on it from before it
gets its name until the process ends, however it ends. So the lock shows whether the owner is alive, also across containers,
where process ids mean nothing; the id in the name is for people.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dynamo.common.shared_memory.layout import Layout, decode_header, encode_header

log = logging.getLogger(__name__)

_NAME = re.compile(r"dynamo-arena-[0-9]{1,10}-[0-9a-f]{16}")
_TOKEN = re.compile(rf"({_NAME.pattern}):([0-9a-f]{{32}})")
_HEADER_READ_BYTES = 128


class ArenaRefused(Exception):
    """An arena cannot be used by this process. `str()` is a reason for the log."""


def boot_id() -> str:
    """The id of the running kernel. Raises OSError where there is none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def create_file(directory: Path, units: int) -> tuple[int, str]:
    """Return the descriptor and the token of a new arena, which other processes can open from now on.

    It has no name before it is locked and complete. The lock ends with the last copy of the descriptor. Raises OSError.
    """
    nonce = secrets.token_bytes(16)
    name = f"dynamo-arena-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # independent of the umask and of the directory's default ACL
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, Layout(units).file_bytes)
        os.posix_fallocate(descriptor, 0, Layout(units).data_offset)
        os.pwrite(descriptor, encode_header(boot_id(), nonce, units), 0)
        _link(descriptor, directory / name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, f"{name}:{nonce.hex()}"


def name_of(token: str) -> str:
    """Return the name of the file that this token opens."""
    return token.partition(":")[0]


def tag_of(token: str) -> int:
    """Return the number that stands for the process with this token in the tables of others."""
    return int(token.rpartition(":")[2][:16], 16)


def is_token(text: str) -> bool:
    return _TOKEN.fullmatch(text) is not None


def _link(descriptor: int, path: Path) -> None:
    """Give an open file without a name this one. Raises FileExistsError."""
    folder = os.open("/proc/self/fd", os.O_DIRECTORY | os.O_CLOEXEC)  # without a folder, `os.link` does not follow links
    try:
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def open_file(directory: Path, token: str) -> tuple[int, Layout]:
    """Open the arena of another process. Raises ArenaRefused unless it is the one that the token means, and ours alone."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ArenaRefused(f"{token[:100]!r} is no token of an arena")
    try:
        descriptor = _open(directory / match[1])
    except OSError as error:
        raise ArenaRefused(f"{match[1]} cannot be opened: {error.strerror}") from None
    try:
        return descriptor, _checked(descriptor, bytes.fromhex(match[2]))
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise ArenaRefused(f"{match[1]} cannot be used: {error}") from None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _checked(descriptor: int, nonce: bytes) -> Layout:
    """Return the layout of an open file. Raises ValueError for one that is not what it should be."""
    status = os.fstat(descriptor)
    if not _is_ours(status):
        raise ValueError("it is not a file of this user alone")
    boot, found_nonce, units = decode_header(os.pread(descriptor, _HEADER_READ_BYTES, 0))
    if boot != boot_id():
        raise ValueError("it belongs to another kernel")
    if not secrets.compare_digest(found_nonce, nonce):
        raise ValueError("its nonce differs from the one of the token")
    layout = Layout(units)
    if status.st_size != layout.file_bytes:
        raise ValueError(f"it has {status.st_size} bytes where {layout.file_bytes} are expected")
    return layout


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def is_owned(descriptor: int) -> bool:
    """Return whether the process that created an arena, which another one opened, is alive."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def remove_file(directory: Path, token: str) -> None:
    """Remove the name of an arena. Readers keep what they have mapped."""
    with suppress(FileNotFoundError):
        os.unlink(directory / name_of(token))


def remove_stale_files(directory: Path) -> int:
    """Remove the arenas of this user whose process is dead. Return how many there were. Raises OSError for the directory."""
    removed = 0
    for name in filter(_NAME.fullmatch, os.listdir(directory)):
        try:
            descriptor = _open(directory / name)
        except OSError:  # it is gone, belongs to another user, or is not a file
            continue
        try:
            if _is_ours(os.fstat(descriptor)) and not is_owned(descriptor):
                remove_file(directory, name)
                removed += 1
        finally:
            os.close(descriptor)
    return removed
