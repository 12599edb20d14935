"""API keys, stored as salted hashes only.

    - name: team-a
      id: 5d0c8e1f72ab
      hash: sha256:6f1c…:90ab…
      scopes: [infer]
      models: [llama-*]
      requests_per_s: 50
      concurrent_requests: 100
      tokens_per_minute: 200000
      stored_bytes: 1073741824
      weight: 2
      expires: 2027-01-31

A key reads `dyn-<id>-<secret>`. The id finds the entry, so a lookup costs one hash however many keys there are, and the digests
are compared in constant time. The secret has 256 random bits and cannot be guessed, so a fast hash is as good as a slow one.
Keys that were made elsewhere have no id; each of them costs every lookup one more hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from dynamo.common.config import ConfigError
from dynamo.frontend.security.surfaces import Scope

MIN_FOREIGN_CHARS = 32
"""The least length of a key made elsewhere: a hash this fast protects long random keys only."""
MAX_LIMIT = 1_000_000_000
"""The largest number of requests per second. `dynamo-keys` accepts no larger value for the other limits either."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000
MAX_PRIORITY = 2**31 - 1
"""The largest priority, and with a minus the smallest, that any request may have."""
MAX_FILE_BYTES = 8 << 20
"""The largest key file; a key takes 200 to 500 bytes of it."""
MAX_DEPTH = 16
"""Lists and mappings in one another that a key file may have."""
key_name: ContextVar[str] = ContextVar("key_name", default="")
"""The API key on whose behalf a task works; empty: there is none, or it is not known yet."""
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""libyaml, where PyYAML was built with it, or else the one in Python."""
_MAX_CHARS = 512
_PREFIX = "dyn"
_HEX = re.compile(r"(?:[0-9a-f]{2})+")

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=MAX_LIMIT)]
Weight = Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@-]+$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit."""

    requests_per_s: float | None = None
    concurrent_requests: int | None = None
    tokens_per_minute: int | None = None
    stored_bytes: int | None = None
    """Bytes of stored files, responses and conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    name: str
    """Names the key's owner in logs."""
    id: str = ""
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope] = frozenset({Scope.INFER})
    models: tuple[str, ...] = ("*",)
    """Patterns of model names, as requests write them."""
    limits: Limits = Limits()
    weight: float = 1.0
    """How much the key gets, in proportion to others, where requests queue."""
    max_priority: int = 0
    """Requests that have a higher one get this."""
    cache_group: str = ""
    """Keys of one group share cached prompts; empty: with no other key."""
    expires_at: float | None = None
    """Unix time, seconds."""

    def may_use(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: Sequence[ApiKey] = (), *, is_blank: bool = False) -> None:
        """`is_blank`: the file is empty, and does not even say that there are no keys."""
        self.keys = tuple(keys)
        self.is_blank = is_blank
        self.by_name = {key.name: key for key in keys}
        self._by_id = {key.id: key for key in keys if key.id}
        self._without_id = tuple(key for key in keys if not key.id)
        self._no_key = ApiKey(name="no key", salt=secrets.token_bytes(16), digest=secrets.token_bytes(32))

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that was presented, or None. Takes as long in both cases."""
        if len(presented) > _MAX_CHARS:
            return None
        data = presented.encode()
        match: ApiKey | None = None
        for key in (self._by_id.get(_id_of(presented), self._no_key), *self._without_id):
            if hmac.compare_digest(_digest(key.salt, data), key.digest):
                match = key
        return match


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One key in the form of the file."""

    name: Name
    hash: str
    id: str = ""
    scopes: tuple[Scope, ...] = (Scope.INFER,)
    models: tuple[str, ...] = ("*",)
    requests_per_s: PositiveFloat | None = None
    concurrent_requests: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    stored_bytes: PositiveInt | None = None
    weight: Weight = 1.0
    max_priority: Priority = 0
    cache_group: Name | Literal[""] = ""
    expires: str | None = None

    def key(self) -> ApiKey:
        """Raises ValueError."""
        method, _, rest = self.hash.partition(":")
        salt, _, digest = rest.partition(":")
        if method != "sha256" or not _HEX.fullmatch(salt) or len(salt) < 16 or not _HEX.fullmatch(digest) or len(digest) != 64:
            raise ValueError("'hash' is not of the form sha256:<salt>:<digest>")
        limits = Limits(
            requests_per_s=self.requests_per_s,
            concurrent_requests=self.concurrent_requests,
            tokens_per_minute=self.tokens_per_minute,
            stored_bytes=self.stored_bytes,
        )
        return ApiKey(
            name=self.name,
            id=self.id,
            salt=bytes.fromhex(salt),
            digest=bytes.fromhex(digest),
            scopes=frozenset(self.scopes),
            models=self.models,
            limits=limits,
            weight=self.weight,
            max_priority=self.max_priority,
            cache_group=self.cache_group,
            expires_at=None if self.expires is None else parse_expiry(self.expires),
        )


def read_keys(path: Path) -> KeyRing:
    """Raises ConfigError, which never shows a hash."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return parse_keys(data.decode())
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the key file {path} cannot be used: {error}") from error


def check_blank(before: KeyRing, after: KeyRing) -> None:
    """Refuse an empty file in the place of one with keys: it is more often one that is being written. Raises ConfigError."""
    if after.is_blank and before.keys:
        raise ConfigError("it is empty; a file without keys contains []")


def parse_keys(text: str) -> KeyRing:
    """Parse a list of keys in YAML; an empty text is a ring without keys. Raises ValueError."""
    try:
        content = _load(text)
        entries = msgspec.convert(content or [], list[_KeyEntry], strict=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ValueError(f"it is not YAML{where}") from None  # the library's message may quote a hash
    except msgspec.ValidationError as error:
        raise ValueError(f"it is not a list of keys: {error}") from None
    keys = []
    for entry in entries:
        try:
            keys.append(entry.key())
        except ValueError as error:
            raise ValueError(f"key '{entry.name}': {error}") from None
    for what, values in (("name", [key.name for key in keys]), ("id", [key.id for key in keys if key.id])):
        for value, count in Counter(values).most_common(1):
            if count > 1:
                raise ValueError(f"the {what} '{value}' is given twice")
    return KeyRing(keys, is_blank=not content and content != [])


def _load(text: str) -> Any:
    """Return what a text in YAML says, with dates and numbers as text, which msgspec reads; None if it is empty.

    `yaml.load` recurses, and by a deeply nested text the one of libyaml ends the process; nor does that let other threads run
    meanwhile. Raises YAMLError, and ValueError also for a field that is given twice.
    """
    documents: list[Any] = []
    opened: list[tuple[list[Any], str | None]] = [(documents, None)]
    """Lists and mappings around the place, each with its anchor; a mapping is a list of fields and values in turn."""
    anchors: dict[str, Any] = {}
    value: Any
    for event in yaml.parse(text, _LOADER):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        match event:
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                if len(opened) > MAX_DEPTH:
                    raise ValueError(f"line {line}: there are lists in lists, more than {MAX_DEPTH} deep")
                opened.append(([], event.anchor))
                continue
            case yaml.SequenceEndEvent():
                value, anchor = opened.pop()
            case yaml.MappingEndEvent():
                items, anchor = opened.pop()
                value = _to_mapping(items, line)
            case yaml.ScalarEvent():
                value, anchor = event.value, event.anchor
            case yaml.AliasEvent():
                if event.anchor not in anchors:
                    raise ValueError(f"line {line}: there is no anchor '{event.anchor}'")
                value, anchor = anchors[event.anchor], None
            case _:
                continue
        opened[-1][0].append(value)
        if anchor is not None:
            anchors[anchor] = value
    if len(documents) > 1:
        raise ValueError("it is more than one document")
    return documents[0] if documents else None


def _to_mapping(items: Sequence[Any], line: int) -> dict[str, Any]:
    fields = items[::2]
    if not all(isinstance(field, str) for field in fields):
        raise ValueError(f"line {line}: a field's name is not text")
    if len(set(fields)) < len(fields):
        raise ValueError(f"line {line}: a field is given twice")
    return dict(zip(fields, items[1::2], strict=True))


def parse_expiry(text: str) -> float:
    """Return the Unix time of a date (its beginning, UTC) or of a date and time. Raises ValueError."""
    try:
        moment = datetime.combine(date.fromisoformat(text), time()) if len(text) == 10 else datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"'expires' is {text!r}, which is neither a date nor a date and time") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def make_key() -> str:
    """Return a new random key."""
    return f"{_PREFIX}-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"


def entry_for(
    key: str,
    name: str,
    *,
    scopes: Sequence[Scope] = (Scope.INFER,),
    models: Sequence[str] = ("*",),
    limits: Limits | None = None,
    weight: float = 1.0,
    max_priority: int = 0,
    cache_group: str = "",
    expires: str | None = None,
) -> str:
    """Return the entry of the key file for `key`. Raises ValueError for a name, key or date that cannot be used."""
    limits = limits or Limits()
    if not _id_of(key) and len(key) < MIN_FOREIGN_CHARS:
        raise ValueError(f"a key made elsewhere needs {MIN_FOREIGN_CHARS} characters or more; this one has {len(key)}")
    salt = secrets.token_bytes(16)
    entry = _KeyEntry(
        name=name,
        id=_id_of(key),
        hash=f"sha256:{salt.hex()}:{_digest(salt, key.encode()).hex()}",
        scopes=tuple(scopes),
        models=tuple(models),
        requests_per_s=limits.requests_per_s,
        concurrent_requests=limits.concurrent_requests,
        tokens_per_minute=limits.tokens_per_minute,
        stored_bytes=limits.stored_bytes,
        weight=weight,
        max_priority=max_priority,
        cache_group=cache_group,
        expires=expires,
    )
    text = yaml.safe_dump([msgspec.to_builtins(entry)], sort_keys=False, default_flow_style=None, width=200)
    parse_keys(text)
    return text


def _id_of(key: str) -> str:
    """Return the id of a key that `make_key` made; empty for others."""
    prefix, _, rest = key.partition("-")
    key_id, dash, secret = rest.partition("-")
    return key_id if prefix == _PREFIX and dash and len(secret) >= MIN_FOREIGN_CHARS else ""


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()
