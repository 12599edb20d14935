"""Accounts: on whose behalf a request is made, and what that caller has used of its limits.

Every request has one. Its protocol edge gets it from the guard and hands it on in the `Call`: `KeyAccount` for the holder of a
key, `ANONYMOUS` where no key is required. Limits apply to each process separately; frontends behind a balancer do not share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Literal, Protocol, Self

from dynamo.common.errors import Forbidden, InvalidRequest, RateLimited, Unauthenticated
from dynamo.frontend.security.keys import ApiKey

Clock = Callable[[], float]

_CONCURRENCY_PAUSE_S = 1.0
_UNLIMITED_SHARE = 0.1
"""Of a token budget, reserved for the response to a request that sets no limit."""


class Bucket:
    """Fills by `rate` a second up to `size`. May be overdrawn, since the cost of a request is known only at its end."""

    __slots__ = ("_filled_at", "level", "rate", "size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate = rate
        self.size = size
        self.level = size
        self._filled_at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until `least` is there; 0 if it is."""
        self._fill(now)
        return max(0.0, (least - self.level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self.level -= amount

    def resize(self, rate: float, size: float, now: float) -> None:
        self._fill(now)
        self.rate, self.size = rate, size
        self.level = min(self.level, size)

    def _fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self._filled_at) * self.rate)
        self._filled_at = now


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What is left of one limit of an account."""

    kind: Literal["requests", "tokens"]
    size: int
    """What may be used at once after a pause."""
    remaining: int
    reset_s: float
    """Until all of `size` is there again."""


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

    def admit(self, model: str, request: object, sequences: int = 1) -> Ticket:
        """Count a part of a request to a model; close the ticket when that part ends.

        `sequences` is how many responses that part generates side by side; each counts as one request. Parts that are open at
        the same time with the same object as `request`, such as the prompts of a batch, are admitted together or not at all
        where the rate is concerned. Raises Unauthenticated, Forbidden, RateLimited, and InvalidRequest for a request that
        alone is above the limit.
        """
        ...

    def occupy(self) -> Ticket:
        """Count work that is no request to a model, such as tokenizing, as one of the requests at once. Raises RateLimited."""
        ...

    def charge(self, tokens: int) -> None:
        """Count tokens of a request whose ticket is closed."""
        ...

    def rate_limits(self) -> Sequence[RateLimit]:
        """Return the limits on requests per second and tokens per minute that the account has."""
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
        self._calls: Bucket | None = None
        """For calls that are not requests to a model, so that reading metadata does not use up the rate of inference."""
        self._tokens: Bucket | None = None
        self._permitted: dict[str, bool] = {}
        self._running: dict[int, _Running] = {}
        self.sequences = 0
        """Requests that have been admitted and are not over; each prompt of a batch and each choice is one."""
        self.renew(key)

    @property
    def name(self) -> str:
        return self.key.name

    def renew(self, key: ApiKey) -> None:
        self.key = key
        self._permitted.clear()
        rate, tokens = key.limits.requests_per_s, key.limits.tokens_per_minute
        # A second's worth at once, so that clients need not space their requests out.
        burst = None if rate is None else max(1.0, rate)
        self._requests = self._renewed(self._requests, rate, burst)
        self._calls = self._renewed(self._calls, rate, burst)
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
        """Count one call that is not a request to a model; requests to models count apart. Raises RateLimited."""
        now = self._clock()
        self._check_rate(self._calls, now)
        if self._calls is not None:
            self._calls.take(1.0, now)

    def admit(self, model: str, request: object, sequences: int = 1) -> Ticket:
        self._follow()  # a stream may have been opened long ago
        self.check_valid()
        self.permit(model)
        running = self._running.get(id(request))
        now = self._clock()
        self._check_concurrency(sequences, 0 if running is None else running.sequences)
        if running is None:
            self._check_tokens(now)
            self._check_rate(self._requests, now, sequences)
            running = self._running[id(request)] = _Running(request)
        if self._requests is not None:
            self._requests.take(sequences, now)
        running.sequences += sequences
        self.sequences += sequences
        return Ticket(self, running, sequences)

    def occupy(self) -> Ticket:
        self._follow()
        self.check_valid()
        self._check_concurrency(1, 0)
        self.sequences += 1
        return Ticket(self, None, 1)

    def part_over(self, running: _Running | None, sequences: int) -> None:
        """A ticket was closed."""
        self.sequences -= sequences
        if running is not None:
            running.sequences -= sequences
            if running.sequences == 0:
                del self._running[id(running.request)]

    def reserve(self, prompt_tokens: int, output_tokens: int | None) -> int:
        """Take the tokens that a request may use out of the budget; return how many. Raises RateLimited.

        A request that may use more than a whole budget is admitted when the budget is full. One without a limit of its own,
        `output_tokens` None, reserves a share of the budget.
        """
        bucket = self._tokens
        if bucket is None:
            return 0
        tokens = prompt_tokens + (int(bucket.size * _UNLIMITED_SHARE) if output_tokens is None else output_tokens)
        now = self._clock()
        if (wait_s := bucket.wait_s(min(tokens, bucket.size), now)) > 0:
            left, limit = max(0, int(bucket.level)), self.key.limits.tokens_per_minute
            raise RateLimited(
                f"the API key '{self.key.name}' has {left} of its {limit} tokens per minute left, "
                f"and this request may use {tokens}",
                retry_after_s=wait_s,
            )
        bucket.take(tokens, now)
        return tokens

    def charge(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def rate_limits(self) -> Sequence[RateLimit]:
        now = self._clock()
        limits = []
        if self._requests is not None:
            limits.append(_left("requests", self._requests, now))
        if self._tokens is not None:
            limits.append(_left("tokens", self._tokens, now))
        return limits

    def _check_concurrency(self, sequences: int, of_request: int) -> None:
        """`of_request` sequences of the same request have been admitted."""
        most = self.key.limits.concurrent_requests
        if most is None or self.sequences + sequences <= most:
            return
        if of_request + sequences > most:
            raise InvalidRequest(
                f"this request has more than {most} prompts and choices, and the API key '{self.key.name}' may have "
                f"{most} requests at once"
            )
        message = f"the API key '{self.key.name}' may have {most} requests at once"
        raise RateLimited(message, retry_after_s=_CONCURRENCY_PAUSE_S)

    def _check_tokens(self, now: float) -> None:
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now)) > 0:
            limit = self.key.limits.tokens_per_minute
            raise RateLimited(f"the API key '{self.key.name}' has used its {limit} tokens per minute", retry_after_s=wait_s)

    def _check_rate(self, bucket: Bucket | None, now: float, requests: int = 1) -> None:
        """A request that counts for more than a second's worth is admitted when that is there, and the next ones wait longer."""
        if bucket is None:
            return
        if (wait_s := bucket.wait_s(min(requests, bucket.size), now)) > 0:
            limit = self.key.limits.requests_per_s
            raise RateLimited(f"the API key '{self.key.name}' may send {limit:g} requests per second", retry_after_s=wait_s)


def _left(kind: Literal["requests", "tokens"], bucket: Bucket, now: float) -> RateLimit:
    reset_s = bucket.wait_s(bucket.size, now)
    return RateLimit(kind, int(bucket.size), max(0, int(bucket.level)), reset_s)


class _Running:
    __slots__ = ("request", "sequences")

    def __init__(self, request: object) -> None:
        self.request = request  # kept, so that no other object gets its id
        self.sequences = 0


class Ticket:
    """A request, or a part of one, that counts against an account until it is closed; a context manager that closes it."""

    __slots__ = ("_account", "_reserved", "_running", "_sequences")

    def __init__(self, account: KeyAccount | None, running: _Running | None, sequences: int) -> None:
        """Without an account nothing is counted."""
        self._account = account
        self._running = running
        self._sequences = sequences
        self._reserved = 0
        """Tokens that are paid for and not used."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def reserve(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Reserve the tokens that the request may use, see `KeyAccount.reserve`; `close` gives back what it did not use."""
        if self._account is not None:
            self._reserved += self._account.reserve(prompt_tokens, output_tokens)

    def charge(self, tokens: int) -> None:
        """Count tokens read or generated, as soon as their number is known."""
        if self._account is None:
            return
        self._reserved -= tokens
        if self._reserved < 0:
            self._account.charge(-self._reserved)
            self._reserved = 0

    def close(self) -> None:
        """End the request, or the part of it. Calls after the first have no effect."""
        account, self._account = self._account, None
        if account is not None:
            account.part_over(self._running, self._sequences)
            if self._reserved:
                account.charge(-self._reserved)


_UNCOUNTED = Ticket(None, None, 0)


class AnonymousAccount:
    """The account of callers that need no key: it permits every model and has no limits."""

    __slots__ = ()

    name = ""

    def permits(self, model: str) -> bool:
        return True

    def permit(self, model: str) -> None:
        pass

    def admit(self, model: str, request: object, sequences: int = 1) -> Ticket:
        return _UNCOUNTED

    def occupy(self) -> Ticket:
        return _UNCOUNTED

    def charge(self, tokens: int) -> None:
        pass

    def rate_limits(self) -> Sequence[RateLimit]:
        return ()


ANONYMOUS = AnonymousAccount()
