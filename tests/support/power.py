"""What is on a disk when the power goes: the files of a process as they were synced last, found out by strace.

The model is that of ext4 with its default options. The content of a file is on disk as of its last fsync, or write with O_SYNC.
Names are journalled in order: whatever is synced takes along all names that were made, changed or deleted before.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_SYSCALLS = (
    *("open", "openat", "creat", "close", "dup", "dup2", "dup3", "lseek", "write", "writev", "pwrite64", "pwritev", "pwritev2"),
    *("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "truncate", "ftruncate", "fallocate", "copy_file_range"),
    *(
        "rename",
        "renameat",
        "renameat2",
        "link",
        "linkat",
        "symlink",
        "symlinkat",
        "unlink",
        "unlinkat",
        "mkdir",
        "mkdirat",
        "rmdir",
    ),
)
_STILL = 10
"""A thread that strace looks at is stopped as well, for a moment; so many looks in a row find all of them stopped at the end."""
_LONGEST_BYTES = 32 << 20
"""Longest write that is read: more than nats-server puts into one."""
_ATTACHED = b"attached"
_LINE = re.compile(r"(?P<thread>\d+) +(?P<text>.*)", re.DOTALL)
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+).*", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(?P<rest>.*)", re.DOTALL)
_UNFINISHED = " <unfinished ...>"


@dataclass(eq=False)
class _File:
    content: bytearray
    synced: bytes = b""


@dataclass
class _Descriptor:
    path: str
    file: _File | None
    """None: a folder."""
    position: int = 0
    appends: bool = False
    syncs: bool = False


class Disk:
    """A folder, as a process sees it and as it is on disk."""

    def __init__(self, root: Path, pid: int) -> None:
        """What is there counts as synced. The process, which is stopped, may have files open."""
        self.root = str(root)
        self._names: dict[str, _File | None] = {}
        """As the process sees them; folders have no file."""
        for path in [root, *root.rglob("*")]:
            content = None if path.is_dir() else path.read_bytes()
            self._names[str(path)] = None if content is None else _File(bytearray(content), content)
        self._synced_names = dict(self._names)
        self._descriptors: dict[int, _Descriptor] = {}
        for number in os.listdir(f"/proc/{pid}/fd"):
            name = os.readlink(f"/proc/{pid}/fd/{number}")
            if name in self._names:
                fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines())
                flags = int(fields["flags"], 8)
                appends, syncs = bool(flags & os.O_APPEND), bool(flags & os.O_DSYNC)
                self._descriptors[int(number)] = _Descriptor(name, self._names[name], int(fields["pos"]), appends, syncs)

    def seen(self) -> dict[str, bytes]:
        """Return the files as the process sees them, by their path."""
        return {path: bytes(file.content) for path, file in self._names.items() if file is not None}

    def write_synced(self, target: Path) -> None:
        """Write what is on disk into another folder."""
        for path, file in sorted(self._synced_names.items()):
            copy = target / os.path.relpath(path, self.root)
            if file is None:
                copy.mkdir(parents=True, exist_ok=True)
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.synced)

    def apply(self, name: str, arguments: list[str], result: int) -> None:
        """Apply a system call that succeeded."""
        if name in ("open", "openat", "creat"):
            at, path, flags = ("AT_FDCWD", *arguments[:2]) if name == "open" else arguments[:3]
            self._open(self._path(at, path), flags, result)
        elif name == "close":
            self._descriptors.pop(int(arguments[0]), None)
        elif name in ("rename", "unlink", "mkdir", "rmdir"):
            self._rename(name, [self._path("AT_FDCWD", path) for path in arguments[: 2 if name == "rename" else 1]])
        elif name in ("renameat", "renameat2"):
            self._rename("rename", [self._path(*arguments[:2]), self._path(*arguments[2:4])])
        elif name in ("unlinkat", "mkdirat"):
            self._rename(name.removesuffix("at"), [self._path(*arguments[:2])])
        elif name == "truncate":
            self._truncate(self._names.get(self._path("AT_FDCWD", arguments[0])), int(arguments[1]))
        elif name in ("sync", "syncfs", "link", "linkat", "symlink", "symlinkat"):
            raise AssertionError(f"{name} is not modelled")
        elif (descriptor := self._descriptors.get(int(arguments[0]))) is not None:
            self._use(descriptor, name, arguments, result)

    def _path(self, at: str, path: str) -> str:
        name = os.fsdecode(_bytes(path))
        if at != "AT_FDCWD" and not os.path.isabs(name):
            folder = self._descriptors.get(int(at))
            return "" if folder is None else os.path.normpath(os.path.join(folder.path, name))
        return os.path.normpath(name)

    def _is_inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    def _open(self, path: str, flags: str, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        if not self._is_inside(path):
            return
        if path not in self._names:
            self._names[path] = _File(bytearray())
        file = self._names[path]
        if "O_TRUNC" in flags:
            self._truncate(file, 0)
        self._descriptors[descriptor] = _Descriptor(path, file, appends="O_APPEND" in flags, syncs="SYNC" in flags)

    def _rename(self, name: str, paths: list[str]) -> None:
        if not self._is_inside(paths[0]):
            return
        match name:
            case "mkdir":
                self._names[paths[0]] = None
            case "unlink" | "rmdir":
                self._names.pop(paths[0], None)
            case _:
                old, new = paths
                moved = {path: file for path, file in self._names.items() if path == old or path.startswith(old + "/")}
                for path, file in moved.items():
                    del self._names[path]
                    self._names[new + path.removeprefix(old)] = file

    def _use(self, descriptor: _Descriptor, name: str, arguments: list[str], result: int) -> None:
        match name:
            case "lseek":
                descriptor.position = result
            case "write":
                position = len(descriptor.file.content) if descriptor.appends and descriptor.file else descriptor.position
                self._write(descriptor, position, _bytes(arguments[1])[:result])
                descriptor.position = position + result
            case "pwrite64":
                self._write(descriptor, int(arguments[3]), _bytes(arguments[1])[:result])
            case "fsync" | "fdatasync":
                self._sync(descriptor.file)
            case "ftruncate":
                self._truncate(descriptor.file, int(arguments[1]))
            case _:
                raise AssertionError(f"{name} of {descriptor.path} is not modelled")

    def _write(self, descriptor: _Descriptor, position: int, data: bytes) -> None:
        assert descriptor.file is not None
        content = descriptor.file.content
        content.extend(bytes(max(0, position - len(content))))
        content[position : position + len(data)] = data
        if descriptor.syncs:
            self._sync(descriptor.file)

    def _sync(self, file: _File | None) -> None:
        if file is not None:
            file.synced = bytes(file.content)
        self._synced_names = dict(self._names)

    def _truncate(self, file: _File | None, size: int) -> None:
        if file is not None:
            file.content[size:] = bytes(max(0, size - len(file.content)))


def _bytes(text: str) -> bytes:
    """Return what strace shows as `"\\x41\\x42"`."""
    assert text.startswith('"') and text.endswith('"'), text[:100]
    return bytes.fromhex(text[1:-1].replace("\\x", ""))


def _calls(log: Path) -> Iterator[tuple[str, list[str], int]]:
    """Yield the system calls that succeeded, each when it ended, but closing when it began: others get the number then."""
    begun: dict[str, str] = {}
    with log.open(encoding="ascii") as lines:
        for line in lines:
            match = _LINE.fullmatch(line.rstrip("\n"))
            assert match is not None, line[:200]
            thread, text = match["thread"], match["text"]
            if text.endswith(_UNFINISHED):
                begun[thread] = text.removesuffix(_UNFINISHED)
                if text.startswith("close("):
                    yield "close", [re.sub(r"\D", "", begun[thread])], 0
                continue
            if (resumed := _RESUMED.fullmatch(text)) is not None:
                text = begun.pop(thread) + resumed["rest"]
                if text.startswith("close("):
                    continue
            call = _CALL.fullmatch(text)
            if call is not None and not call["result"].startswith("-"):
                yield call["name"], call["arguments"].split(", "), int(call["result"])


@dataclass(frozen=True)
class Trace:
    """What a process has done to a folder."""

    _log: Path
    _before: Disk
    _tracer: asyncio.subprocess.Process

    async def disk(self) -> Disk:
        """Return the disk at the end of the process, once that was killed."""
        await self._tracer.wait()
        for name, arguments, result in _calls(self._log):
            self._before.apply(name, arguments, result)
        return self._before


async def stop_between_calls(pid: int) -> None:
    """Stop a process that is traced, each thread of it after its system call: one that is killed in a write is not in the log."""
    os.kill(pid, signal.SIGSTOP)
    still = 0
    while still < _STILL:
        await asyncio.sleep(0.01)
        states = [status.read_text().partition("State:")[2].split()[0] for status in Path(f"/proc/{pid}/task").glob("*/status")]
        still = still + 1 if all(state in "tT" for state in states) else 0


@asynccontextmanager
async def traced(pid: int, folder: Path, log: Path) -> AsyncIterator[Trace]:
    """Trace what a process that runs does to a folder until it is killed."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    os.kill(pid, signal.SIGSTOP)
    while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
        await asyncio.sleep(0.001)
    before = Disk(folder, pid)
    command = (strace, "-f", "-p", str(pid), "-o", str(log), "-xx", "-s", str(_LONGEST_BYTES), "-e", "signal=none")
    tracer = await asyncio.create_subprocess_exec(*command, "-e", f"trace={','.join(_SYSCALLS)}", stderr=asyncio.subprocess.PIPE)
    assert tracer.stderr is not None
    try:
        async with asyncio.timeout(120):
            line = await tracer.stderr.readline()
        assert _ATTACHED in line, line
        os.kill(pid, signal.SIGCONT)
        yield Trace(log, before, tracer)
    finally:
        if tracer.returncode is None:
            tracer.terminate()
        await tracer.wait()
