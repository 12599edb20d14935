"""Requests by names of operators: one request, tried on the models that its name stands for.

The caller needs permission for the name that it sent and for the model that serves it; models that it may not use are passed
over. A fallback is tried only before anything of a response went out, as a request of its own: it is admitted and counted again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from dynamo.common.errors import DynamoError, Forbidden, ModelNotFound, NoInstances, Overloaded, RateLimited, Unavailable
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.names.plan import Candidate, Draw, Identity, Plan, make_plan, representative
from dynamo.frontend.names.rules import Condition, Rule
from dynamo.frontend.preprocess.text import ContextExceeded
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel

T = TypeVar("T")

Attempt = Callable[[NamedModel, Call], Awaitable[T]]
"""Serves the request by a model. Raises DynamoError."""


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
        find: Callable[[Account, str, str], NamedModel],
        is_ready: Callable[[str, str], bool],
        draw: Draw = random.random,
        passed_over: Callable[[str], None] = lambda model: None,
    ) -> None:
        """`find` returns a model that an account may use; `is_ready` says whether one, in this version, can be used now.

        `passed_over` is called with each that was not ready, and whose request another model gets.
        """
        self._passed_over = passed_over
        self._table = table
        self._metrics = metrics
        self._find = find
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

    def serve(
        self,
        call: Call,
        name: str,
        attempt: Attempt[T],
        *,
        version: str = "",
        has_begun: Callable[[], bool] = lambda: False,
        user: str | None = None,
        sequence: str = "",
    ) -> Awaitable[T]:
        """The result of `attempt` with the model `name` or, if an operator made that name, with the first that can serve it.

        `has_begun` says whether a part of the response went out, after which there is no fallback. `user` is the one in the
        request, if any, instead of its API key. Requests of one sequence go to one model. Raises the error of the last attempt.
        """
        rules = self._table.rules
        if name not in rules:  # it is a model's own, as most are
            return attempt(self._find(call.account, name, version), call)
        call.account.permit(name)
        identity = Identity(session=call.session, user=user or call.account.name, sequence=sequence)
        plan = make_plan(rules, name, identity, call.account.permits, self._draw)
        if not plan.candidates:
            raise _all_forbidden(call.account, name)
        return self._serve(call, name, plan, attempt, version, has_begun)

    async def _serve(
        self, call: Call, name: str, plan: Plan, attempt: Attempt[T], version: str, has_begun: Callable[[], bool]
    ) -> T:
        call = msgspec.structs.replace(call, shadows=plan.shadows)
        position, reason = 0, "target"
        while True:
            candidate = plan.candidates[position]
            next_one = _next(plan, position, Condition.NO_INSTANCES)
            if next_one is not None and not self._is_ready(candidate.model, version):
                self._passed_over(candidate.model)
                position, reason = next_one, Condition.NO_INSTANCES.value
                continue
            self._metrics.sent_by_name(name, candidate.model, reason)
            try:
                return await attempt(self._find(call.account, candidate.model, version), call)
            except DynamoError as error:
                condition = condition_of(error)
                next_one = None if condition is None or has_begun() else _next(plan, position, condition)
                if next_one is None or condition is None:
                    if isinstance(error, ModelNotFound) and not error.version:
                        raise NoInstances(candidate.model) from error
                    raise
            position, reason = next_one, condition.value
            call = msgspec.structs.replace(call, shadows=())


def _all_forbidden(account: Account, name: str) -> Forbidden:
    return Forbidden(f"'{name}' stands for models that the API key '{account.name}' may not use")


def _next(plan: Plan, position: int, condition: Condition) -> int | None:
    """Return the position of the first model after `position` that is tried after such a failure."""
    later: list[Candidate] = list(plan.candidates[position + 1 :])
    return next((position + 1 + index for index, each in enumerate(later) if condition in each.on), None)
