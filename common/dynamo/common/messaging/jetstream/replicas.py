"""How many replicas JetStream keeps of what this project stores in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.js.errors import APIError

T = TypeVar("T")

_REPLICAS = 3
"""A cluster of three goes on without one of its servers."""
_NOT_A_CLUSTER = 10074
_NO_SUITABLE_PEERS = 10005
_INSUFFICIENT_RESOURCES = 10023


async def create_replicated(create: Callable[[int], Awaitable[T]]) -> T:
    """Call `create` with a number of replicas: three, or one where nats-server is single or its cluster too small.

    nats-server does not respond to what a login may not do.
    """
    try:
        return await create(_REPLICAS)
    except APIError as error:
        if error.err_code not in (_NOT_A_CLUSTER, _NO_SUITABLE_PEERS, _INSUFFICIENT_RESOURCES):
            raise
    except TimeoutError:
        raise TimeoutError("it is not there yet, and this login may not make it, or JetStream does not respond") from None
    return await create(1)
