"""LoRA adapters that are loaded at run time.

A frontend writes what a model is to have as a record in etcd; the instances of the model follow the records, load and unload, and
say in their model cards what came of it (`AdapterReport`). So instances that start later have the adapter too.
"""

from __future__ import annotations

import secrets

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import adapters_prefix, check_name, encode

MAX_PATH_CHARS = 1024
MAX_ERROR_CHARS = 300
MAX_LOADED = 256
"""Adapters of one instance: its card names each."""


class DesiredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that every instance of a model is to have."""

    name: str
    """Unique among the adapters of a namespace."""
    model: str
    """The model that it changes, by its own name."""
    path: str
    """A folder on the hosts of the workers, or of the engine servers behind them."""
    load_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Another one with each request to load: weights may be another's at the same path."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A request to load an adapter into all instances of a model."""

    name: str
    path: str
    model: str = ""
    """Empty: the only model whose instances load adapters."""
    in_place: bool = False
    """Replace an adapter of that name."""


def adapter_key(namespace: str, name: str) -> str:
    """The etcd key of an adapter's record. Raises InvalidRequest for a name that cannot be used."""
    return adapters_prefix(namespace) + encode(name, "adapter name")


def encode_adapter(adapter: DesiredAdapter) -> bytes:
    return msgspec.json.encode(adapter)


def decode_adapter(key: str, value: bytes) -> DesiredAdapter:
    """Decode the record under `key`. Raises InvalidRequest if it is malformed or belongs to another key."""
    try:
        adapter = _DECODER.decode(value)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise InvalidRequest(f"it cannot be read: {error}") from None
    check_name(adapter.model)
    if not key.endswith(f"/{encode(adapter.name, 'adapter name')}"):
        raise InvalidRequest(f"its content is that of adapter '{adapter.name}'")
    return adapter


_DECODER = msgspec.json.Decoder(DesiredAdapter)
