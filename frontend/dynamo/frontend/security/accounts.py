"""Accounts: on whose behalf a request is made, and what that caller has used of its limits.

Every request has one. Its protocol edge gets it from the guard and hands it on in the `Call`: `KeyAccount` for the holder of a
key, `ANONYMOUS` where no key is required. Limits apply to each process separately; frontends behind a balancer do not share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Protocol

from dynamo.common.errors import Forbidden, RateLimited, Unauthenticated
from dynamo.frontend.security.keys import ApiKey

Clock = Callable[[], float]

_CONCURRENCY_PAUSE_S = 1.0


class Bucket:
    """Fills by `rate` a second up to `size`. May be overdrawn, since the cost of a request is known only at its end."""

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


class Account(Protocol):
    """On whose behalf a call is made."""

    @property
    def name(self) -> str:
        """The name of the key; empty without one."""
        ...

    def permits(self, model: str) -> bool:
        """Return whether this caller may use a model."""
        ...

    def permit(self, model: str) -> None:
        """Raise Forbidden unless this caller may use a model, whether or not the model exists."""
        ...

    def admit(self, model: str, request: object) -> Ticket:
        """Count a part of a request to a model; close the ticket when that part ends.

        Parts that are open at the same time with the same object as `request`, such as the prompts of a batch, count as one.
        Raises Unauthenticated, Forbidden, RateLimited.
        """
        ...

    def charge(self, tokens: int) -> None:
        """Count tokens of a request whose ticket is closed."""
        ...


class KeyAccount:
    """The account of one key. It survives a reload of the key file, so that a reload does not reset what was used."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic, follow: Callable[[], None] = lambda: None) -> None:
        """`follow` checks whether the key file has changed and updates the accounts."""
        self.key = key
        self.withdrawn = False
        """The key is no longer in the file; streams that it opened may still be open."""
        self._clock = clock
        self._follow = follow
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._permitted: dict[str, bool] = {}
        self._running: dict[int, _Running] = {}
        self.renew(key)

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def running(self) -> int:
        """The number of requests that have been admitted and are not over."""
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
        permitted = self._permitted.get(model)
        if permitted is None:
            permitted = any(fnmatchcase(model, pattern) for pattern in self.key.models)
            if len(self._permitted) < 1024:  # clients choose these names
                self._permitted[model] = permitted
        return permitted

    def permit(self, model: str) -> None:
        if not self.permits(model):
            raise Forbidden(f"the API key '{self.key.name}' may not use model '{model[:200]}'")

    def count(self) -> None:
        """Count one call that is no request to a model. Raises RateLimited."""
        self._check_rate(self._clock())

    def admit(self, model: str, request: object) -> Ticket:
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
    """A request, or a part of one, that counts against an account until it is closed."""

    __slots__ = ("_account", "_running")

    def __init__(self, account: KeyAccount | None, running: _Running | None) -> None:
        """Without an account nothing is counted."""
        self._account = account
        self._running = running

    def charge(self, tokens: int) -> None:
        """Count tokens read or generated, as soon as their number is known."""
        if self._account is not None:
            self._account.charge(tokens)

    def close(self) -> None:
        """End the request, or the part of it. Calls after the first have no effect."""
        if self._account is not None and self._running is not None:
            self._account.part_over(self._running)
            self._running = None


_UNCOUNTED = Ticket(None, None)


class AnonymousAccount:
    """The account of callers that need no key: it permits every model and has no limits."""

    __slots__ = ()

    name = ""

    def permits(self, model: str) -> bool:
        return True

    def permit(self, model: str) -> None:
        pass

    def admit(self, model: str, request: object) -> Ticket:
        return _UNCOUNTED

    def charge(self, tokens: int) -> None:
        pass


ANONYMOUS = AnonymousAccount()
