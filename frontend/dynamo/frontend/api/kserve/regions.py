"""System shared memory that clients on this host register: inputs are read from it and outputs written into it.

A region is part of a POSIX shared-memory object. It is read and written through its descriptor and never mapped, so a client that
shrinks the object gets an error, and not this process a signal.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo.common.errors import AlreadyExists, DynamoError, EngineError, InvalidRequest, NotFound
from dynamo.common.tensors import Buffer

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory is on Linux
MAX_REGIONS = 4096
_RESERVED = ("triton_python_backend_shm_region_", "dynamo-arena-")
"""Beginnings of the keys of memory that processes of models and of this project share among themselves."""
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory."""

    name: str
    key: str
    offset: int
    size_bytes: int
    descriptor: int

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of a place in the region, which `Regions.find` has checked. Raises InvalidRequest if it is gone."""
        data = os.pread(self.descriptor, size_bytes, self.offset + offset)
        if len(data) != size_bytes:
            raise self._gone()
        return data

    def write(self, offset: int, data: Buffer) -> None:
        """Write to a place in the region, which `Regions.find` has checked. Raises InvalidRequest if it is gone."""
        if os.fstat(self.descriptor).st_size < self.offset + offset + len(data):
            raise self._gone()
        os.pwrite(self.descriptor, data, self.offset + offset)

    def _gone(self) -> InvalidRequest:
        return InvalidRequest(f"the memory of shared memory region '{self.name}' is smaller than when it was registered")


class Regions:
    """The registered regions of one process."""

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = folder
        self._regions: dict[str, Region] = {}

    def __repr__(self) -> str:
        return f"<Regions {sorted(self._regions)}>"

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register part of the object `key`.

        Raises InvalidRequest for a part that the object does not have, EngineError if there is no such object, AlreadyExists.
        """
        if len(name) > 1024:
            raise InvalidRequest(f"the name of a shared memory region has {len(name)} characters; at most 1024 are allowed")
        if key.lstrip("/").startswith(_RESERVED):
            raise InvalidRequest(f"cannot register shared memory region '{name}': the key '{key[:80]}' is reserved")
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= MAX_REGIONS:
            raise InvalidRequest(f"{MAX_REGIONS} shared memory regions are registered; no more are allowed")
        descriptor = self._open(key)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not 0 < size_bytes <= _MAX_BYTES or offset + size_bytes > status.st_size:
            os.close(descriptor)
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
        self._regions[name] = Region(name, key, offset, size_bytes, descriptor)

    def unregister(self, name: str) -> None:
        """Forget a region, or all if `name` is empty. An unknown one is none to forget."""
        for region in [self._regions[name]] if name in self._regions else [] if name else list(self._regions.values()):
            del self._regions[region.name]
            os.close(region.descriptor)

    def status(self, name: str) -> Iterable[Region]:
        """Return a region, or all if `name` is empty. Raises NotFound."""
        if not name:
            return list(self._regions.values())
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name[:200]}'")
        return [self._regions[name]]

    def find(self, name: str, offset: int, size_bytes: int) -> Region:
        """Return the region that has these bytes. Raises NotFound, InvalidRequest."""
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name[:200]}'")
        if not 0 <= offset < region.size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < size_bytes <= region.size_bytes - offset:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region

    def close(self) -> None:
        self.unregister("")

    def _open(self, key: str) -> int:
        path = key.lstrip("/")
        try:
            if not path or "/" in path or "\0" in path or path in (".", ".."):
                raise FileNotFoundError
            return os.open(os.path.join(self._folder, path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise EngineError(f"Unable to open shared memory region: '{key[:300]}'") from error


def too_small(output: str, given_bytes: int, needed_bytes: int) -> DynamoError:
    return EngineError(
        f"shared memory size specified with the request for output '{output}' ({given_bytes} bytes) should be at least "
        f"{needed_bytes} bytes to hold the results"
    )
