"""What the holder of a key has used of its limits, and the account that the current request goes to.

Limits hold per process: frontends share nothing, and behind a balancer each sees its part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from fnmatch import fnmatchcase

from dynamo.common.errors import Forbidden, RateLimited, Unauthenticated
from dynamo.frontend.security.keys import ApiKey

Clock = Callable[[], float]

_CONCURRENCY_PAUSE_S = 1.0


class Bucket:
    """Fills by `rate` a second up to `size`. May be overdrawn, since what a request costs is known only at its end."""

    __slots__ = ("_at", "_level", "rate", "size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate = rate
        self.size = size
        self._level = size
        self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until `least` is there; 0 if it is."""
        self._fill(now)
        return max(0.0, (least - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def resize(self, rate: float, size: float, now: float) -> None:
        self._fill(now)
        self.rate, self.size = rate, size
        self._level = min(self._level, size)

    def _fill(self, now: float) -> None:
        self._level = min(self.size, self._level + (now - self._at) * self.rate)
        self._at = now


class Account:
    """One key's. Lives on when the key file is read anew, so that this does not give anybody a fresh budget."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic, follow: Callable[[], None] = lambda: None) -> None:
        """`follow` looks whether the key file has changed and tells the accounts."""
        self.key = key
        self.withdrawn = False
        """The key is no longer in the file; streams that it opened may still be there."""
        self._clock = clock
        self._follow = follow
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._permitted: dict[str, bool] = {}
        self._running: dict[int, _Running] = {}
        self.renew(key)

    @property
    def running(self) -> int:
        """Requests that have been admitted and not closed."""
        return len(self._running)

    def renew(self, key: ApiKey) -> None:
        self.key = key
        self._permitted.clear()
        rate, tokens = key.limits.requests_per_s, key.limits.tokens_per_minute
        # A second's worth at once, so that clients need not space their requests out.
        self._requests = self._renewed(self._requests, rate, None if rate is None else max(1.0, rate))
        self._tokens = self._renewed(self._tokens, None if tokens is None else tokens / 60.0, tokens)

    def _renewed(self, bucket: Bucket | None, rate: float | None, size: float | None) -> Bucket | None:
        if rate is None or size is None:
            return None
        if bucket is None:
            return Bucket(rate, size, self._clock())
        bucket.resize(rate, size, self._clock())
        return bucket

    def check_valid(self) -> None:
        """Raises Unauthenticated."""
        if self.withdrawn:
            raise Unauthenticated(f"the API key '{self.key.name}' is not valid any more")
        if self.key.expires_at is not None and time.time() >= self.key.expires_at:
            raise Unauthenticated(f"the API key '{self.key.name}' has expired")

    def permits(self, model: str) -> bool:
        if self.key.models == ("*",):
            return True
        found = self._permitted.get(model)
        if found is None:
            found = any(fnmatchcase(model, pattern) for pattern in self.key.models)
            if len(self._permitted) < 1024:  # clients choose these names
                self._permitted[model] = found
        return found

    def permit(self, model: str) -> None:
        """Raises Forbidden. Says the same of models that are not there, so that names cannot be found out."""
        if not self.permits(model):
            raise Forbidden(f"the API key '{self.key.name}' may not use model '{model[:200]}'")

    def count(self) -> None:
        """One call that asks no model. Raises RateLimited."""
        self._check_rate(self._clock())

    def admit(self, model: str, request: object) -> Ticket:
        """Part of a request to a model, to be closed at its end.

        Parts that are open at the same time with the same object as `request`, such as the prompts of a batch, count as one.
        Raises Unauthenticated, Forbidden, RateLimited.
        """
        self._follow()  # a stream may have been opened long ago
        self.check_valid()
        self.permit(model)
        running = self._running.get(id(request))
        if running is None:
            self._check_limits(self._clock())
            running = self._running[id(request)] = _Running(request)
        running.parts += 1
        return Ticket(self, running)

    def _check_limits(self, now: float) -> None:
        most = self.key.limits.concurrent_requests
        if most is not None and self.running >= most:
            message = f"the API key '{self.key.name}' may have {most} requests at once"
            raise RateLimited(message, retry_after_s=_CONCURRENCY_PAUSE_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now)) > 0:
            limit = self.key.limits.tokens_per_minute
            raise RateLimited(f"the API key '{self.key.name}' has used its {limit} tokens per minute", retry_after_s=wait_s)
        self._check_rate(now)

    def part_over(self, running: _Running) -> None:
        running.parts -= 1
        if running.parts == 0:
            del self._running[id(running.request)]

    def charge(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def _check_rate(self, now: float) -> None:
        if self._requests is None:
            return
        if (wait_s := self._requests.wait_s(1.0, now)) > 0:
            limit = self.key.limits.requests_per_s
            raise RateLimited(f"the API key '{self.key.name}' may send {limit:g} requests per second", retry_after_s=wait_s)
        self._requests.take(1.0, now)


class _Running:
    __slots__ = ("parts", "request")

    def __init__(self, request: object) -> None:
        self.request = request  # kept, so that no other object gets its id
        self.parts = 0


class Ticket:
    """A request, or a part of one, that counts against an account while it runs."""

    __slots__ = ("_account", "_running")

    def __init__(self, account: Account, running: _Running) -> None:
        self._account = account
        self._running: _Running | None = running

    def charge(self, tokens: int) -> None:
        """Tokens read or made, as soon as they are known."""
        self._account.charge(tokens)

    def close(self) -> None:
        """Idempotent."""
        if self._running is not None:
            self._account.part_over(self._running)
            self._running = None


account: ContextVar[Account | None] = ContextVar("account", default=None)
"""Whose request the current task works on; None where keys are not asked for. Set by each protocol edge."""


def permit(model: str) -> None:
    """Raises Forbidden if the current request may not name this model."""
    if (holder := account.get()) is not None:
        holder.permit(model)


def permits(model: str) -> bool:
    holder = account.get()
    return holder is None or holder.permits(model)


def admit(model: str, request: object) -> Ticket | None:
    """Counts the current request against its account, as `Account.admit` does; None if there is none."""
    return None if (holder := account.get()) is None else holder.admit(model, request)


def charge(tokens: int) -> None:
    """Tokens of the current request that no ticket stands for any more."""
    if (holder := account.get()) is not None:
        holder.charge(tokens)
