"""Hosts: simulated processes on one of them have a folder for arenas in common. Folders, files and memory are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from unittest import mock

from dynamo.common.options import SharedMemoryOptions
from dynamo.common.shared_memory import sharing
from dynamo.common.shared_memory.files import remove_stale_files
from dynamo.common.shared_memory.layout import UNIT_BYTES
from dynamo.common.shared_memory.sharing import SharedMemory
from tests.simulation.clock import current_process
from tests.support.arenas import memory_folder

_CAPACITY_BYTES = 16 * UNIT_BYTES
"""Two large bodies fill an arena."""
_THRESHOLD_BYTES = 5_000


class Hosts:
    """In one history of four processes share no memory; in the others each one is on one of two hosts."""

    def __init__(self, rng: Random, folders: list[Path]) -> None:
        self._rng = rng
        self._folders = folders
        self._is_shared = rng.random() < 0.75

    def place(self) -> SharedMemoryOptions:
        """Return the options of a process that starts."""
        size = _CAPACITY_BYTES if self._is_shared else 0
        return SharedMemoryOptions(dir=self._rng.choice(self._folders), size=size, threshold=_THRESHOLD_BYTES)

    def files(self) -> set[str]:
        """Return the arenas that are left after the start of one more process."""
        for folder in self._folders:
            remove_stale_files(folder)
        return {path.name for folder in self._folders for path in folder.iterdir()}

    def remove_name(self, token: str) -> bool:
        """Remove the file of a live arena, as a clean-up of the folder does. Return whether there was one."""
        paths = [folder / token.partition(":")[0] for folder in self._folders]
        there = [path for path in paths if path.exists()]
        for path in there:
            path.unlink()
        return bool(there)


@contextmanager
def open_hosts(rng: Random) -> Iterator[Hosts]:
    """Arenas that are opened meanwhile belong to the simulated process that opens them, and their locks end when it is killed."""
    with ExitStack() as stack:
        folders = [stack.enter_context(memory_folder()) for _ in range(2)]
        stack.enter_context(mock.patch.object(sharing, "SharedMemory", _open))
        yield Hosts(rng, folders)


def _open(directory: Path, capacity_bytes: int, least_bytes: int) -> SharedMemory:
    memory = SharedMemory(directory, capacity_bytes, least_bytes)
    process = current_process()
    assert process is not None
    process.at_death.append(memory.abandon)
    return memory
