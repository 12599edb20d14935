"""System shared memory that clients on this host register: inputs are read from it and outputs written into it.

A region is part of a POSIX shared-memory object. It is read and written through its descriptor and never mapped, so a client that
shrinks the object gets an error, and not this process a signal.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dynamo.common.errors import AlreadyExists, DynamoError, EngineError, Forbidden, InvalidRequest, NotFound
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.kserve.registrations import OwnRegistrations, Registration, Registrations

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory is on Linux
MAX_REGIONS = 4096
_RESERVED = ("triton_python_backend_shm_region_", "dynamo-arena-")
"""Beginnings of the keys of memory that processes of models and of this project share among themselves."""
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ClientRegion:
    """Registered memory that is open. It is closed with the last request that uses it."""

    registration: Registration
    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self, offset: int, room: memoryview) -> None:
        """Copy a place in the region, which `Regions.find` has checked, into `room`. Raises InvalidRequest if it is gone."""
        if os.preadv(self.descriptor, [room], self.registration.offset + offset) != len(room):
            raise self._shrunk()

    def write(self, offset: int, data: Buffer) -> None:
        """Write to a place in the region, which `Regions.find` has checked. Raises InvalidRequest if it is gone."""
        start = self.registration.offset + offset
        if os.fstat(self.descriptor).st_size < start + len(data):
            raise self._shrunk()
        os.pwrite(self.descriptor, data, start)

    def _shrunk(self) -> InvalidRequest:
        return InvalidRequest(
            f"the memory of shared memory region '{self.registration.name}' is smaller than when it was registered"
        )


def _gone(registration: Registration) -> InvalidRequest:
    return InvalidRequest(f"the memory of shared memory region '{registration.name}' was removed after it was registered")


class Regions:
    """The registered regions, and those of them that this process has open."""

    def __init__(
        self,
        folder: str = FOLDER,
        registrations: Registrations | None = None,
        *,
        keys: Sequence[str] = ("*",),
        max_request_bytes: int = 2**31 - 1,
    ) -> None:
        """`registrations`: those of all processes that serve the same clients; None: of this one alone. `keys`: patterns, as of
        `fnmatch`, of the keys that clients may register. `max_request_bytes`: of the inputs of one request.
        """
        self.max_request_bytes = max_request_bytes
        self._folder = folder
        self._registrations = OwnRegistrations() if registrations is None else registrations
        self._keys = keys
        self._open_regions: dict[str, ClientRegion] = {}

    def __repr__(self) -> str:
        return f"<Regions {sorted(self._open_regions)}>"

    def register(self, name: str, key: str, offset: int, size_bytes: int, owner: str = "") -> None:
        """Register part of the object `key` for the account `owner`.

        Raises InvalidRequest for a part that the object does not have, EngineError if there is no such object, AlreadyExists,
        Forbidden.
        """
        if len(name) > 1024:
            raise InvalidRequest(f"the name of a shared memory region has {len(name)} characters; at most 1024 are allowed")
        plain = key.lstrip("/")
        if plain.startswith(_RESERVED):
            raise InvalidRequest(f"cannot register shared memory region '{name}': the key '{key[:80]}' is reserved")
        if not any(fnmatchcase(plain, pattern.lstrip("/")) for pattern in self._keys):
            raise Forbidden(f"cannot register shared memory region '{name}': clients may not name the key '{key[:80]}'")
        registered = self._registrations.all()
        if any(one.name == name for one in registered):
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(registered) >= MAX_REGIONS:
            raise InvalidRequest(f"{MAX_REGIONS} shared memory regions are registered; no more are allowed")
        descriptor = self._open(key)
        status = os.fstat(descriptor)
        registration = Registration(
            name=name, key=key, offset=offset, size_bytes=size_bytes, device=status.st_dev, inode=status.st_ino, owner=owner
        )
        if not stat.S_ISREG(status.st_mode) or not 0 < size_bytes <= _MAX_BYTES or offset + size_bytes > status.st_size:
            os.close(descriptor)
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
        if not self._registrations.add(registration):
            os.close(descriptor)
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        self.close_stale()
        self._open_regions[name] = ClientRegion(registration, descriptor)

    def unregister(self, name: str) -> None:
        """Forget a region, or all if `name` is empty. An unknown one is none to forget."""
        for registration in self._registrations.all():
            if name in ("", registration.name):
                self._registrations.remove(registration.name)
        self.close_stale()

    def status(self, name: str) -> Iterable[Registration]:
        """Return a region, or all if `name` is empty. Raises NotFound."""
        if not name:
            return sorted(self._registrations.all(), key=lambda registration: registration.name)
        registration = self._registrations.get(name)
        if registration is None:
            raise NotFound(f"Unable to find system shared memory region: '{name[:200]}'")
        return [registration]

    def find(self, name: str, offset: int, size_bytes: int, owner: str = "") -> ClientRegion:
        """Return the region of the account `owner` that has these bytes. Raises NotFound, InvalidRequest."""
        registration = self._registrations.get(name)
        if registration is None:
            self._open_regions.pop(name, None)
        if registration is None or registration.owner != owner:
            raise NotFound(f"Unable to find shared memory region: '{name[:200]}'")
        region = self._open_regions.get(name)
        if region is None or region.registration.token != registration.token:
            region = self._reopen(registration)
        if not 0 <= offset < registration.size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < size_bytes <= registration.size_bytes - offset:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region

    def close_stale(self) -> None:
        """Close the regions that other processes have unregistered, whose memory would stay in use otherwise."""
        for name, region in list(self._open_regions.items()):
            registration = self._registrations.get(name)
            if registration is None or registration.token != region.registration.token:
                del self._open_regions[name]

    def close(self) -> None:
        """Close all regions. Those of several processes stay registered."""
        self._open_regions.clear()

    def _reopen(self, registration: Registration) -> ClientRegion:
        """Open a region that another process registered. Raises InvalidRequest if its object is gone, or another one by now."""
        self._open_regions.pop(registration.name, None)
        try:
            descriptor = self._open(registration.key)
        except EngineError as error:
            raise _gone(registration) from error
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (registration.device, registration.inode):
            os.close(descriptor)
            raise _gone(registration)
        region = self._open_regions[registration.name] = ClientRegion(registration, descriptor)
        return region

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
