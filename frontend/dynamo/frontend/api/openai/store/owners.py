"""To whom records belong."""

from __future__ import annotations

import hashlib


def owner_token(owner: str) -> str:
    """Return what stands for the name of a key in the keys of its records."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
