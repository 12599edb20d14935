"""Requests by names of operators: one request, tried on the models that its name stands for.

The caller needs permission for the name that it sent and for the model that serves it; models that it may not use are passed
over. A fallback is tried only before anything of a response went out, as a request of its own: it is admitted and counted again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from dynamo.common.errors import DynamoError, Forbidden, ModelNotFound, NoInstances, Overloaded, RateLimited, Unavailable
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.names.plan import Candidate, Draw, Identity, Plan, make_plan, representative
from dynamo.frontend.names.rules import Condition, Rule
from dynamo.frontend.preprocess.text import ContextExceeded
from dynamo.frontend.security.accounts import Account

T = TypeVar("T")

Attempt = Callable[[str, tuple[str, ...]], Awaitable[T]]
"""Serves the request by a model, with copies to the shadow models. Raises DynamoError."""


class RuleTable(Protocol):
    """The part of `names.table.NameTable` that serving needs."""

    @property
    def rules(self) -> Mapping[str, Rule]: ...


class NoRules:
    """A table without names."""

    rules: Mapping[str, Rule] = {}


def condition_of(error: DynamoError) -> Condition | None:
    """Return the condition of fallbacks that a failed attempt meets; None: no other model would do better."""
    if isinstance(error, ContextExceeded):
        return Condition.PROMPT_TOO_LONG
    if isinstance(error, RateLimited):  # the caller's own limit
        return None
    if isinstance(error, Overloaded):
        return Condition.OVERLOADED
    if isinstance(error, Unavailable) or (isinstance(error, ModelNotFound) and not error.version):
        return Condition.NO_INSTANCES
    return None


class ModelNames:
    """The names of operators, as requests use them."""

    def __init__(
        self,
        table: RuleTable,
        metrics: FrontendMetrics,
        is_ready: Callable[[str, str], bool],
        draw: Draw = random.random,
    ) -> None:
        """`is_ready` says whether a model, in a version or in any, can be used now."""
        self._table = table
        self._metrics = metrics
        self._is_ready = is_ready
        self._draw = draw

    @property
    def rules(self) -> Mapping[str, Rule]:
        return self._table.rules

    def has_rule(self, name: str) -> bool:
        return name in self._table.rules

    def representative(self, account: Account, name: str, version: str = "") -> str:
        """Return the model that is described where `name` is to be. Raises Forbidden."""
        rules = self._table.rules
        if name not in rules:
            return name
        account.permit(name)
        model = representative(rules, name, account.permits, lambda model: self._is_ready(model, version))
        if model is None:
            raise _all_forbidden(account, name)
        return model

    async def serve(
        self,
        account: Account,
        name: str,
        identity: Identity,
        attempt: Attempt[T],
        *,
        version: str = "",
        has_begun: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return the result of `attempt` with the first model that can serve the request. Raises its error if none can.

        `has_begun` says whether a part of the response went out, after which there is no fallback.
        """
        rules = self._table.rules
        if name not in rules:
            return await attempt(name, ())
        account.permit(name)
        plan = make_plan(rules, name, identity, account.permits, self._draw)
        if not plan.candidates:
            raise _all_forbidden(account, name)
        return await self._serve(name, plan, attempt, version, has_begun)

    async def _serve(self, name: str, plan: Plan, attempt: Attempt[T], version: str, has_begun: Callable[[], bool]) -> T:
        shadows = plan.shadows
        position, reason = 0, "target"
        while True:
            candidate = plan.candidates[position]
            next_one = _next(plan, position, Condition.NO_INSTANCES)
            if next_one is not None and not self._is_ready(candidate.model, version):
                position, reason = next_one, Condition.NO_INSTANCES.value
                continue
            self._metrics.sent_by_name(name, candidate.model, reason)
            try:
                return await attempt(candidate.model, shadows)
            except DynamoError as error:
                condition = condition_of(error)
                next_one = None if condition is None or has_begun() else _next(plan, position, condition)
                if next_one is None or condition is None:
                    if isinstance(error, ModelNotFound) and not error.version:
                        raise NoInstances(candidate.model) from error
                    raise
            position, reason = next_one, condition.value
            shadows = ()


def _all_forbidden(account: Account, name: str) -> Forbidden:
    return Forbidden(f"'{name}' stands for models that the API key '{account.name}' may not use")


def _next(plan: Plan, position: int, condition: Condition) -> int | None:
    """Return the position of the first model after `position` that is tried after such a failure."""
    later: list[Candidate] = list(plan.candidates[position + 1 :])
    return next((position + 1 + index for index, each in enumerate(later) if condition in each.on), None)
