"""Models that can be started: each has a record in etcd with what frontends need of a model that has no instance.

The planner puts a record for each pool that it manages, and deletes it when it manages the pool no more. The card is that of an
instance as it registered last. A card of an instance that is registered counts before it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.etcd import Etcd
from dynamo.common.model_card import ModelCard
from dynamo.common.names import Endpoint, standby_key
from dynamo.common.scaling.pool import Pool

MAX_STANDBY_BYTES = 1024 * 1024
"""As for registrations: etcd refuses requests above 1.5 MiB."""
MAX_START_S = 86_400.0


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one model in one role, which are started when there are requests. This is the value of the key."""

    card: ModelCard
    endpoint: Endpoint
    """The one at which its instances register."""
    start_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_START_S)] = 0.0
    """How long the last start took; 0: none has been seen."""

    @property
    def pool(self) -> Pool:
        return Pool.of(self.card)

    @property
    def key(self) -> str:
        """The etcd key of the record."""
        return pool_standby_key(self.endpoint.namespace, self.pool)


def pool_standby_key(namespace: str, pool: Pool) -> str:
    """Return the etcd key of the record of a pool."""
    return standby_key(namespace, pool.role.value, pool.model)


_DECODER = msgspec.json.Decoder(Standby)


def encode_standby(standby: Standby) -> bytes:
    """Return the JSON that is put under `standby.key`. Raises InvalidRequest for a card that is wrong or too large."""
    standby.card.check()
    value = msgspec.json.encode(standby)
    if len(value) > MAX_STANDBY_BYTES:
        raise InvalidRequest(
            f"the record of model '{standby.card.name}' has {len(value)} bytes; at most {MAX_STANDBY_BYTES} are allowed"
        )
    return value


def decode_standby(key: str, value: bytes) -> Standby:
    """Return the record under `key`. Raises InvalidRequest if the value is none that belongs there."""
    if len(value) > MAX_STANDBY_BYTES:
        raise InvalidRequest(f"it has {len(value)} bytes; at most {MAX_STANDBY_BYTES} are allowed")
    try:
        standby = _DECODER.decode(value)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise InvalidRequest(f"it cannot be read: {error}") from None
    standby.card.check()
    if standby.key != key:
        raise InvalidRequest(f"its content belongs under {standby.key}")
    return standby


async def put_standby(etcd: Etcd, standby: Standby) -> None:
    """Let frontends take requests for a model whether or not it has instances. Raises InvalidRequest, and Unavailable."""
    await etcd.put(standby.key, encode_standby(standby))


async def delete_standby(etcd: Etcd, namespace: str, pool: Pool) -> None:
    """Let frontends take requests for a model only while it has instances. Raises Unavailable."""
    await etcd.delete(pool_standby_key(namespace, pool))
