"""Makes the router that the options describe."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import assert_never

from dynamo.frontend.config import RouterMode, RouterOptions
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import NEVER_BUSY, ThresholdTable
from dynamo.frontend.router.policies.balance import LoadRouter, least_loaded, power_of_two
from dynamo.frontend.router.policies.busy_filter import BusyFilterRouter
from dynamo.frontend.router.simple import Direct, RandomChoice, RoundRobin

_BY_LOAD = (RouterMode.KV, RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO)


def effective_mode(options: RouterOptions) -> RouterMode:
    """Return the mode, with `load_aware` taken into account."""
    if options.load_aware and options.mode is RouterMode.ROUND_ROBIN:
        return RouterMode.LEAST_LOADED
    if options.load_aware and options.mode is RouterMode.RANDOM:
        return RouterMode.POWER_OF_TWO
    return options.mode


def follows_loads(options: RouterOptions) -> bool:
    """Return whether the router uses the loads of instances: by its mode, or because a busy threshold is configured."""
    return effective_mode(options) in _BY_LOAD or options.thresholds != NEVER_BUSY


def make_router(
    options: RouterOptions,
    loads: LoadTable,
    clock: Callable[[], float],
    thresholds: ThresholdTable | None = None,
    *,
    rng: random.Random | None = None,
    terms: CostTerms = COST_TERMS,
) -> Router:
    """Make a router. `loads` is used by routers that look at load; `clock` must be the clock that stamps its reports.

    `thresholds` defaults to the configured ones; `terms` are those of the KV router's cost.
    """
    mode = effective_mode(options)
    if thresholds is None:
        thresholds = ThresholdTable(options.thresholds)
    blind: Router
    match mode:
        case RouterMode.KV:
            return KvRouter(options.kv, thresholds, loads, rng=rng, clock=clock, terms=terms)
        case RouterMode.LEAST_LOADED:
            return LoadRouter(mode.value, least_loaded, thresholds, loads, rng=rng, clock=clock)
        case RouterMode.POWER_OF_TWO:
            return LoadRouter(mode.value, power_of_two, thresholds, loads, rng=rng, clock=clock)
        case RouterMode.ROUND_ROBIN:
            blind = RoundRobin(rng)
        case RouterMode.RANDOM:
            blind = RandomChoice(rng)
        case RouterMode.DIRECT:
            blind = Direct()
        case _:
            assert_never(mode)
    return BusyFilterRouter(blind, thresholds, loads, clock=clock) if follows_loads(options) else blind
