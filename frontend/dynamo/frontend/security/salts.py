"""Salts of cached prompts, by which those of a key, or of its group, are kept apart from those of others."""

from __future__ import annotations

from hashlib import sha256

from dynamo.frontend.security.keys import ApiKey

_OWN = "key:"
_SALT_CHARS = 32
"""Digits kept of a hexadecimal digest: 128 bits, for which no other text can be found."""


def salt_of(key: ApiKey, cache_salt: str) -> str:
    """Return the salt for cached prompts of a key, or of its group, with the salt that the client sent."""
    return _salt("group", key.cache_group, cache_salt) if key.cache_group else _salt("key", key.name, cache_salt)


def _salt(kind: str, owner: str, cache_salt: str) -> str:
    # Names have no line breaks, so different owners and salts are different texts.
    return _OWN + sha256(f"{kind}\n{owner}\n{cache_salt}".encode()).hexdigest()[:_SALT_CHARS]


def salt_without_key(cache_salt: str) -> str:
    """Return the salt for cached prompts of a client without a key."""
    return _salt("", "", cache_salt) if cache_salt.startswith(_OWN) else cache_salt  # which salts of keys begin with
