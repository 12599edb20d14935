"""Accounts that do as another one, but for what they change."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.errors import EngineError
from dynamo.frontend.security.accounts import Account, OpenStream, Ticket
from dynamo.frontend.security.ledger import UsageCounts
from dynamo.frontend.security.sharing import RateLimit


class SameAccount:
    """An account that does as another one, but for what a class derived from it changes."""

    __slots__ = ("_account",)

    def __init__(self, account: Account) -> None:
        self._account = account

    @property
    def name(self) -> str:
        return self._account.name

    @property
    def weight(self) -> float:
        return self._account.weight

    @property
    def max_priority(self) -> int:
        return self._account.max_priority

    @property
    def models(self) -> tuple[str, ...]:
        return self._account.models

    def isolate(self, cache_salt: str) -> str:
        return self._account.isolate(cache_salt)

    def permits(self, model: str) -> bool:
        return self._account.permits(model)

    def permit(self, model: str) -> None:
        self._account.permit(model)

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        return self._account.admit(model, request, sequences, of)

    def check_limits(self) -> None:
        self._account.check_limits()

    def check_tokens(self) -> None:
        self._account.check_tokens()

    def occupy(self) -> Ticket:
        return self._account.occupy()

    def open_stream(self) -> OpenStream:
        return self._account.open_stream()

    def take_calls(self, calls: int) -> None:
        self._account.take_calls(calls)

    def take_tokens(self, tokens: int) -> None:
        self._account.take_tokens(tokens)

    def record(self, model: str, usage: UsageCounts) -> None:
        self._account.record(model, usage)

    def rate_limits(self) -> Sequence[RateLimit]:
        return self._account.rate_limits()


class WithoutRequests(SameAccount):
    """The account of a key, for an operation that does not declare that it is charged with requests to models."""

    __slots__ = ()

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        raise EngineError("this operation makes a request to a model, with which it does not declare to be charged")


class FairAccount(SameAccount):
    """The account of a key, for one of those whose requests it makes: where requests wait, each has turns of its own."""

    __slots__ = ("_for_whom",)

    def __init__(self, account: Account, for_whom: str) -> None:
        super().__init__(account)
        self._for_whom = for_whom

    @property
    def name(self) -> str:
        return f"{self._account.name}/{self._for_whom}"
