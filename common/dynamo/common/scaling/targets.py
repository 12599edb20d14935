"""How many instances each pool is to have: what a planner has decided last, in one key of etcd.

The program that starts and ends workers, `dynamo-local` or one of the operator, follows the key and makes the numbers true. They
are absolute, and stay as they are while there is no planner: a dead one changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.common.names import ROOT, InstanceId, encode
from dynamo.common.scaling.pool import Pool

TARGETS_ROOT = f"{ROOT}/%targets"
"""Below `ROOT`, so that one permission in etcd covers both; one key per namespace."""
MAX_INSTANCES = 100_000


class PoolTarget(msgspec.Struct, frozen=True, kw_only=True):
    """How many instances one pool is to have."""

    pool: Pool
    instances: Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANCES)]
    leave: tuple[InstanceId, ...] = ()
    """The instances to end first where there are more, those whose caches are worth least first."""
    reason: str = ""
    """Why, in words."""
    decided_at: float = 0.0
    """Unix time, seconds."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the key."""

    planner: str = ""
    """The process that decided."""
    targets: tuple[PoolTarget, ...] = ()


def targets_key(namespace: str) -> str:
    """Return the etcd key of the targets of a namespace."""
    return f"{TARGETS_ROOT}/{encode(namespace, 'namespace')}"


_DECODER = msgspec.json.Decoder(Targets)


def encode_targets(targets: Targets) -> bytes:
    return msgspec.json.encode(targets)


def decode_targets(value: bytes) -> Targets:
    """Raises ValueError or RecursionError for bytes that are not valid."""
    return _DECODER.decode(value)
