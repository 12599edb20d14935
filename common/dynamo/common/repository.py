"""The state of a worker's model repository, and the requests that change it.

Such a worker registers a `RepositoryInstance` beside its models, under the same lease. Frontends merge these for
RepositoryIndex, and send `repository_load` and `repository_unload` to all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import Endpoint, GivenInstanceId, InstanceId
from dynamo.common.process.work import Work
from dynamo.common.protocol import UNNAMED, check_protocol
from dynamo.common.tensors.tensors import Buffer

LOAD = "repository_load"
UNLOAD = "repository_unload"
MAX_REASON_CHARS = 500
NOT_LOADED = "not loaded"
"""The reason of a model that was never to be loaded."""
UNLOADED = "unloaded"
"""The reason of a model that was unloaded on request."""
MAX_INDEX_BYTES = 1024 * 1024
_MAX_DIGITS = 20
"""Digits of the longest version that is a number; versions of Triton are numbers of 64 bits."""


class ControlMode(StrEnum):
    """Which models of a repository are loaded."""

    NONE = "none"
    """All models, at the start."""
    EXPLICIT = "explicit"
    """Models named at the start, and models of RepositoryModelLoad and RepositoryModelUnload requests."""
    POLL = "poll"
    """All models in the folders, which are scanned periodically."""


class ModelState(StrEnum):
    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of one model of a repository."""

    name: str
    version: str = ""
    """Empty for a model that was never loaded: its versions are unknown."""
    state: ModelState = ModelState.UNAVAILABLE
    reason: str = ""
    """Why the model is not ready."""

    @property
    def is_wanted(self) -> bool:
        """Whether the model should be loaded and is not."""
        return self.state is not ModelState.READY and self.reason not in (NOT_LOADED, UNLOADED)


class RepositoryInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker with a repository. This is the value of its registration."""

    id: GivenInstanceId
    endpoint: Endpoint
    subject: str
    """NATS subject that takes its requests."""
    mode: ControlMode
    entries: tuple[IndexEntry, ...] = ()
    protocol: int = UNNAMED

    @property
    def key(self) -> str:
        """The etcd key of the registration."""
        return self.endpoint.repository_key(self.id)

    def encode(self) -> bytes:
        """Return the JSON under `key`. Reasons are left out if the index would be too long with them. Raises InvalidRequest."""
        value = msgspec.json.encode(self)
        if len(value) > MAX_INDEX_BYTES:
            bare = tuple(msgspec.structs.replace(entry, reason="") for entry in self.entries)
            value = msgspec.json.encode(msgspec.structs.replace(self, entries=bare))
        if len(value) > MAX_INDEX_BYTES:
            raise InvalidRequest(f"the index of {len(self.entries)} models has {len(value)} bytes; at most {MAX_INDEX_BYTES} fit")
        return value


_DECODER = msgspec.json.Decoder(RepositoryInstance)


def decode_repository(key: str, value: bytes) -> RepositoryInstance:
    """Decode the registration under `key`. Raises InvalidRequest if it is malformed or belongs to another key."""
    try:
        instance = _DECODER.decode(value)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise InvalidRequest(f"it cannot be read: {error}") from None
    check_protocol(instance.protocol)
    if instance.key != key:
        raise InvalidRequest(f"its content belongs under {instance.key}")
    if instance.subject != instance.endpoint.rpc_subject(instance.id):  # see `discovery.decode_registration`
        raise InvalidRequest(f"{instance.subject[:200]!r} is not the subject that takes its requests")
    return instance


Files: TypeAlias = Mapping[str, Sequence[Buffer]]
"""A model's files by their paths in its folder: the pieces of each."""
NO_FILES: Files = MappingProxyType({})
_FILES, _MAP, _BYTES = msgspec.msgpack.encode("files"), b"\xdf", b"\xc6"
"""In MessagePack: the name of a member, and what precedes the size of a map and of bytes."""


ALL_MODELS = ("*",)


def matches(model: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the shell-style patterns of a key matches the name of a model."""
    return any(fnmatchcase(model, pattern) for pattern in patterns)


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `repository_load`."""

    model: str
    config: str = ""
    """A ModelConfig as JSON, instead of the model's `config.pbtxt`."""
    files: Mapping[str, bytes] = {}
    """The model's files by their paths in its folder, instead of those in the repository."""
    path: str = ""
    """A folder or an object-store URL that holds the model, instead of the one in the repository."""
    permitted: tuple[str, ...] = ALL_MODELS
    """Patterns of the models that the caller may use: a model that an ensemble needs is not changed without the right to that."""

    def encoded(self, files: Files) -> list[Buffer]:
        """Return the body of this request with `files`, whose contents are not copied; it has none of its own."""
        settings = msgspec.msgpack.encode(self)
        if not files:
            return [settings]
        number = bytes((settings[0] + 1,))  # the head of a map of less than 16 members
        pieces: list[Buffer] = [number, settings[1:], _FILES, _MAP + len(files).to_bytes(4)]
        for path, content in files.items():
            size = sum(map(len, content))
            pieces += (msgspec.msgpack.encode(path), _BYTES + size.to_bytes(4), *content)
        return pieces


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `repository_unload`."""

    model: str
    dependents: bool = False
    """Also the models that an ensemble is made of."""
    permitted: tuple[str, ...] = ALL_MODELS
    """Patterns of the models that the caller may use: no other one is unloaded."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Response to `repository_load`: the versions of the model that the worker serves now."""

    versions: tuple[str, ...]


_Order: TypeAlias = tuple[str, int, str]
_Place: TypeAlias = tuple[_Order, InstanceId, IndexEntry]
_ORDER: Callable[[_Place], _Order] = itemgetter(0)


def merge_indexes(instances: Sequence[RepositoryInstance], permits: Callable[[str], bool]) -> Work[list[IndexEntry]]:
    """Merge the repositories of several workers, ordered by name and version, of the models whose names are permitted.

    An entry is READY if it is at one worker; its reason then names the workers where it is not. The empty version of a model that
    one worker has not loaded is left out if another worker has versions.
    """
    indexes: list[list[_Place]] = []
    for instance in instances:
        indexes.append(sorted(((version_order((e.name, e.version)), instance.id, e) for e in instance.entries), key=_ORDER))
        yield 0
    merged: list[IndexEntry] = []
    for (name, *_), group in groupby(heapq.merge(*indexes, key=_ORDER), _ORDER):
        yield 0
        found = [(where, entry) for _, where, entry in group]
        if not permits(name):
            continue
        if merged and merged[-1].name == name and not merged[-1].version:  # the empty version comes first
            merged.pop()
        merged.append(_merge(found))
    return merged


def version_order(key: tuple[str, str]) -> _Order:
    """Return what a model's name and version are sorted by: version 10 comes after 2."""
    name, version = key
    is_number = version.isdecimal() and len(version) <= _MAX_DIGITS  # a worker may write thousands, which are none for `int`
    return name, int(version) if is_number else 0, version


def is_wanted(entries: Collection[IndexEntry]) -> bool:
    """Return whether what several workers say about one version of a model is, merged, that it should be loaded and is not."""
    if not entries or any(entry.state is ModelState.READY for entry in entries):
        return False
    reasons = {entry.reason or entry.state.value for entry in entries}
    return len(reasons) > 1 or any(entry.is_wanted for entry in entries)


def _merge(entries: list[tuple[InstanceId, IndexEntry]]) -> IndexEntry:
    order = list(ModelState)
    best = min((entry for _, entry in entries), key=lambda entry: order.index(entry.state))
    lacking = [(where, entry) for where, entry in entries if entry.state is not ModelState.READY]
    if len(entries) == 1 or not lacking:
        return best
    reasons = {entry.reason or entry.state.value for _, entry in lacking}
    if len(lacking) == len(entries) and len(reasons) == 1:
        return best
    lacking.sort(key=itemgetter(0))  # a worker may say several things about one version
    text = "; ".join(f"worker {where:x}: {entry.reason or entry.state.value}" for where, entry in lacking)
    return msgspec.structs.replace(best, reason=text[: 4 * MAX_REASON_CHARS])
