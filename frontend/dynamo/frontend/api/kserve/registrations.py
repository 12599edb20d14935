"""Which regions of shared memory are registered: in one process, or in the folder of several that serve the same ports."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import msgspec


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an object that a client has registered under a name."""

    name: str
    key: str
    offset: int
    size_bytes: int
    device: int
    inode: int
    """With `device`, which object it was. Another one may have its key by now."""
    owner: str = ""
    """Name of the account that registered it and may use it; without API keys all callers are one account without a name."""
    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Tells it from earlier and later ones of the same name."""


class Registrations(Protocol):
    """A table of registrations by name."""

    def add(self, registration: Registration) -> bool:
        """Return False, and change nothing, if the name is taken."""
        ...

    def get(self, name: str) -> Registration | None: ...

    def remove(self, name: str) -> None:
        """Remove a registration, if there is one of this name."""
        ...

    def all(self) -> Collection[Registration]: ...


class OwnRegistrations:
    """Registrations of one process."""

    def __init__(self) -> None:
        self._by_name: dict[str, Registration] = {}

    def add(self, registration: Registration) -> bool:
        return self._by_name.setdefault(registration.name, registration) is registration

    def get(self, name: str) -> Registration | None:
        return self._by_name.get(name)

    def remove(self, name: str) -> None:
        self._by_name.pop(name, None)

    def all(self) -> Collection[Registration]:
        return list(self._by_name.values())


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Registration)


class SharedRegistrations:
    """Registrations of several processes on this host: a file for each, in a folder that only these processes can read.

    A file appears whole, by a link, which fails where the name is taken. Processes see each other's changes at once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def add(self, registration: Registration) -> bool:
        draft = self._folder / f"{registration.token}.draft"
        draft.write_bytes(_ENCODER.encode(registration))
        try:
            os.link(draft, self._file_of(registration.name))
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def get(self, name: str) -> Registration | None:
        return _read(self._file_of(name))

    def remove(self, name: str) -> None:
        self._file_of(name).unlink(missing_ok=True)

    def all(self) -> Collection[Registration]:
        return [one for path in self._folder.glob("*.region") if (one := _read(path)) is not None]

    def _file_of(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}.region"


def _read(path: Path) -> Registration | None:
    try:
        return _DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return None
