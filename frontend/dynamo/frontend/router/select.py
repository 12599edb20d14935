"""From a router mode to the router."""

from __future__ import annotations

from typing import assert_never

from dynamo.frontend.config import RouterMode
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.simple import Direct, RandomChoice, RoundRobin


def make_router(mode: RouterMode) -> Router:
    """A new router, without any knowledge."""
    match mode:
        case RouterMode.ROUND_ROBIN:
            return RoundRobin()
        case RouterMode.RANDOM:
            return RandomChoice()
        case RouterMode.DIRECT:
            return Direct()
        case _:
            assert_never(mode)
