"""Folders for arenas, in memory, and stand-ins for the processes that read them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READER_TAG = 0xFEED


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory that is removed, with all in it, at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-arenas-") as folder:
        yield Path(folder)


@dataclass
class FakeReader:
    """A reader whose life and progress a test decides."""

    is_alive: bool = True
    beat: int = 0
    tag: int = READER_TAG


def mappings_of(inode: int) -> int:
    """How many mappings of a file this process has, whatever the file is called by now."""
    return sum(int(line.split()[4]) == inode for line in Path("/proc/self/maps").read_text().splitlines())
