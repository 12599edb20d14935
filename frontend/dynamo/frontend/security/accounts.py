"""Accounts: on whose behalf a request is made, and what that caller has used of its limits.

Every request has one. Its protocol edge gets it from the guard and hands it on in the `Call`: `KeyAccount` for the holder of a
key, `ANONYMOUS` where there are no keys, `WITHOUT_KEY` for who shows none where that is open. All frontends of a namespace share
the limits of a key; see `sharing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from dynamo.common.errors import Forbidden, InvalidRequest, RateLimited, Unauthenticated
from dynamo.common.names import MAX_NAME_CHARS
from dynamo.common.repository import ALL_MODELS, matches
from dynamo.frontend.security.keys import MAX_PRIORITY, ApiKey
from dynamo.frontend.security.ledger import Ledger, UsageCounts
from dynamo.frontend.security.salts import salt_of, salt_without_key
from dynamo.frontend.security.sharing import Fleet, KeyUse, RateLimit, RateMeter, Shares, SlotMeter

Clock = Callable[[], float]

_CONCURRENCY_PAUSE_S = 1.0
_UNLIMITED_SHARE = 0.1
"""Share of a token budget that is reserved for the response to a request that sets no limit."""


class Account(Protocol):
    """On whose behalf a call is made."""

    @property
    def name(self) -> str:
        """The name of the key; empty without one."""
        ...

    @property
    def weight(self) -> float:
        """How much this caller gets, in proportion to others, where requests queue."""
        ...

    @property
    def max_priority(self) -> int:
        """The highest priority that requests of this caller have."""
        ...

    @property
    def models(self) -> tuple[str, ...]:
        """Patterns of the names of the models that this caller may use."""
        ...

    def isolate(self, cache_salt: str) -> str:
        """Return the salt for cached prompts of this caller that sends `cache_salt`: no other one can have requests with it."""
        ...

    def permits(self, model: str) -> bool:
        """Return whether this caller may use a model."""
        ...

    def permit(self, model: str) -> None:
        """Raise Forbidden unless this caller may use a model, whether or not the model exists."""
        ...

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        """Count a part of a request to a model; close the ticket when that part ends.

        `sequences` is how many responses that part generates side by side; each counts as one request. Parts that are open at
        the same time with the same object as `request`, such as the prompts of a batch, are admitted together or not at all
        where the rate is concerned, and where requests at once are, if the first says how many sequences they are `of`. Raises
        Unauthenticated, Forbidden, RateLimited, and InvalidRequest for a request that alone is above the limit.
        """
        ...

    def check_limits(self) -> None:
        """Raise RateLimited if every request to a model would be refused now. Takes nothing."""
        ...

    def check_tokens(self) -> None:
        """Raise RateLimited if its budget has no tokens left, Unauthenticated for a key that is valid no more. Takes nothing."""
        ...

    def occupy(self) -> Ticket:
        """Count work that is no request to a model, such as tokenizing, as one of the requests at once. Raises RateLimited."""
        ...

    def open_stream(self) -> OpenStream:
        """Count a stream in which requests come, and which may have none for long, until it is closed. Raises RateLimited."""
        ...

    def take_calls(self, calls: int) -> None:
        """Count so many calls that are no requests to a model, however many the rate has left."""
        ...

    def take_tokens(self, tokens: int) -> None:
        """Take tokens out of the budget, however many are left; a negative number is given back."""
        ...

    def record(self, model: str, usage: UsageCounts) -> None:
        """Write what a request used into the ledger."""
        ...

    def rate_limits(self) -> Sequence[RateLimit]:
        """Return the limits on requests per second and tokens per minute that the account has."""
        ...


class KeyAccount:
    """The account of one key. It survives a reload of the key file, so that a reload does not reset what was used."""

    def __init__(
        self,
        key: ApiKey,
        clock: Clock = time.monotonic,
        follow: Callable[[], None] = lambda: None,
        fleet: Fleet | None = None,
        ledger: Ledger | None = None,
        salts: bool = True,
    ) -> None:
        """`follow` checks whether the key file has changed and updates the accounts. `fleet`: who shares the limits.

        `salts`: whether cached prompts are kept apart from those of other keys.
        """
        self.key = key
        self.withdrawn = False
        """The key is no longer in the file; streams that it opened may still be open."""
        self._clock = clock
        self._follow = follow
        self._fleet = fleet or Fleet()
        self._ledger = ledger or Ledger()
        self._salts = salts
        self._salt = ""
        """Salt of requests that bring none along."""
        self._inference = Shares(self._fleet)
        self._metadata = Shares(self._fleet)
        self._requests: RateMeter | None = None
        self._calls: RateMeter | None = None
        """For calls that are not requests to a model, so that reading metadata does not use up the rate of inference."""
        self._tokens: RateMeter | None = None
        self._slots: SlotMeter | None = None
        self._permitted: dict[str, bool] = {}
        self._running: dict[int, _Running] = {}
        self.sequences = 0
        """Requests that have been admitted here and are not over; each prompt of a batch and each choice is one."""
        self._streams = 0
        """Streams of requests that are open here; they do not count as requests, which a stream may have many of, or none."""
        self.renew(key)

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def weight(self) -> float:
        return self.key.weight

    @property
    def max_priority(self) -> int:
        return self.key.max_priority

    @property
    def models(self) -> tuple[str, ...]:
        return self.key.models

    def isolate(self, cache_salt: str) -> str:
        if not self._salts:
            return ANONYMOUS.isolate(cache_salt)
        return salt_of(self.key, cache_salt) if cache_salt else self._salt

    def renew(self, key: ApiKey) -> None:
        self.key = key
        self._salt = salt_of(key, "") if self._salts else ""
        self._permitted.clear()
        rate, tokens, slots = key.limits.requests_per_s, key.limits.tokens_per_minute, key.limits.concurrent_requests
        # A second's worth at once, so that clients need not space their requests out.
        burst = None if rate is None else max(1.0, rate)
        self._requests = self._renewed(self._requests, rate, burst, self._inference)
        self._calls = self._renewed(self._calls, rate, burst, self._metadata)
        self._tokens = self._renewed(self._tokens, None if tokens is None else tokens / 60.0, tokens, self._inference)
        if slots is None:
            self._slots = None
        elif self._slots is None:
            self._slots = SlotMeter(slots, self._inference, self.sequences)
        else:
            self._slots.limit = slots

    def _renewed(self, meter: RateMeter | None, rate: float | None, size: float | None, shares: Shares) -> RateMeter | None:
        if rate is None or size is None:
            return None
        if meter is None:
            return RateMeter(rate, size, shares, self._clock())
        meter.resize(rate, size, self._clock())
        return meter

    # The use of limits, shared with other processes

    @property
    def is_in_use(self) -> bool:
        """Whether other processes have to know what is used here."""
        now = self._clock()
        rates = (self._requests, self._calls, self._tokens)
        return self.sequences > 0 or any(meter is not None and meter.full_in_s(now) > 0 for meter in rates)

    def use(self) -> KeyUse:
        """Return what this process has used."""
        now = self._clock()
        return KeyUse(
            self.key.name,
            self._inference.demand(now),
            self._metadata.demand(now),
            self.sequences,
            *(None if meter is None else meter.use() for meter in (self._requests, self._calls, self._tokens)),
        )

    def apply(self, origin: str, use: KeyUse) -> None:
        """Another process has used so much."""
        now = self._clock()
        self._inference.apply(origin, use.demand, now)
        self._metadata.apply(origin, use.metadata_demand, now)
        if self._slots is not None:
            self._slots.apply(origin, use.in_use)
        uses = ((self._requests, use.requests), (self._calls, use.calls), (self._tokens, use.tokens))
        for meter, taken in uses:
            if meter is not None and taken is not None:
                meter.apply(origin, taken, now)

    def forget(self, origin: str) -> None:
        """Another process has gone; what it had in use is free."""
        for part in (self._inference, self._metadata, self._slots, self._requests, self._calls, self._tokens):
            if part is not None:
                part.forget(origin)

    # What the key may do

    def check_valid(self) -> None:
        """Raises Unauthenticated."""
        if self.withdrawn:
            raise Unauthenticated(f"the API key '{self.key.name}' is not valid any more")
        if self.key.expires_at is not None and time.time() >= self.key.expires_at:
            raise Unauthenticated(f"the API key '{self.key.name}' has expired")

    def permits(self, model: str) -> bool:
        if self.key.models == ALL_MODELS:
            return True
        permitted = self._permitted.get(model)
        if permitted is None:
            permitted = matches(model, self.key.models)
            if len(self._permitted) < 1024 and len(model) <= MAX_NAME_CHARS:  # clients choose these names, of any length
                self._permitted[model] = permitted
        return permitted

    def permit(self, model: str) -> None:
        if not self.permits(model):
            raise Forbidden(f"the API key '{self.key.name}' may not use model '{model[:200]}'")

    def count(self) -> None:
        """Count one call that is not a request to a model; requests to models count apart. Raises RateLimited."""
        if self._calls is None:
            return
        now = self._clock()
        self._metadata.requested(1, now)
        self._fleet.used(self.name)
        self._check_rate(self._calls, now)
        self._calls.take(1.0, now)

    def take_calls(self, calls: int) -> None:
        if self._calls is not None and calls:
            self._fleet.used(self.name)
            self._calls.take(calls, self._clock())

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        self._follow()  # a stream may have been opened long ago
        self.check_valid()
        self.permit(model)
        running = self._running.get(id(request))
        now = self._clock()
        more = max(sequences, of) if running is None else max(0, sequences - running.kept)
        if more:
            self._requested(more, now)
            self._check_concurrency(more, 0 if running is None else running.sequences)
        if running is None:
            self._check_tokens(now)
            self._check_rate(self._requests, now, sequences)
            running = self._running[id(request)] = _Running(request)
        if self._requests is not None:
            self._requests.take(sequences, now)
        running.sequences += sequences
        running.kept += more - sequences
        self._occupy(more)
        return Ticket(self, running, sequences)

    def check_limits(self) -> None:
        now = self._clock()
        try:
            self._check_for_one(now)
        except RateLimited:  # it counts for this process's share of the limits, which may be an old one
            self._requested(1, now)
            self._check_for_one(now)

    def check_tokens(self) -> None:
        self._follow()
        self.check_valid()
        self._check_tokens(self._clock())

    def _check_for_one(self, now: float) -> None:
        if self._slots is not None and self._slots.may_be_full:  # a large request may fit where, by its share, one does not
            self._check_concurrency(1, 0)
        self._check_tokens(now)
        self._check_rate(self._requests, now)

    def occupy(self) -> Ticket:
        self._follow()
        self.check_valid()
        self._requested(1, self._clock())
        self._check_concurrency(1, 0)
        self._occupy(1)
        return Ticket(self, None, 1)

    def open_stream(self) -> OpenStream:
        most = self.key.limits.concurrent_requests
        if most is not None and self._streams >= most:
            message = f"the API key '{self.key.name}' may have {most} streams open at once, as many as requests"
            raise RateLimited(message, retry_after_s=_CONCURRENCY_PAUSE_S)
        self._streams += 1
        return OpenStream(self)

    def stream_closed(self) -> None:
        self._streams -= 1

    def _requested(self, sequences: int, now: float) -> None:
        if self._is_limited:
            self._inference.requested(sequences, now)
            self._fleet.used(self.name)

    @property
    def _is_limited(self) -> bool:
        return self._requests is not None or self._tokens is not None or self._slots is not None

    def _occupy(self, sequences: int) -> None:
        self.sequences += sequences
        if self._slots is not None:
            self._slots.take(sequences)

    def part_over(self, running: _Running | None, sequences: int) -> None:
        """A ticket was closed."""
        if running is not None:
            running.sequences -= sequences
            if running.sequences == 0:
                sequences += running.kept
                del self._running[id(running.request)]
        self.sequences -= sequences
        if self._slots is not None:
            self._slots.give_back(sequences)
            self._fleet.used(self.name)

    def reserve(self, prompt_tokens: int, output_tokens: int | None) -> int:
        """Take the tokens that a request may use out of the budget; return how many. Raises RateLimited.

        A request that may use more than a whole budget is admitted when the budget is full. One without a limit of its own,
        `output_tokens` None, reserves a share of the budget.
        """
        meter = self._tokens
        if meter is None:
            return 0
        tokens = prompt_tokens + (int(meter.size * _UNLIMITED_SHARE) if output_tokens is None else output_tokens)
        now = self._clock()
        if (wait_s := meter.wait_s(min(tokens, meter.size), now)) > 0:
            left, limit = max(0, int(meter.level)), self.key.limits.tokens_per_minute
            raise RateLimited(
                f"the API key '{self.key.name}' has {left} of its {limit} tokens per minute left, "
                f"and this request may use {tokens}",
                retry_after_s=wait_s,
            )
        meter.take(tokens, now)
        return tokens

    def take_tokens(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())
            self._fleet.used(self.name)

    def record(self, model: str, usage: UsageCounts) -> None:
        self._ledger.add(self.name, model, usage)

    def rate_limits(self) -> Sequence[RateLimit]:
        now = self._clock()
        limits = []
        if self._requests is not None:
            limits.append(self._requests.left("requests", now))
        if self._tokens is not None:
            limits.append(self._tokens.left("tokens", now))
        return limits

    def _check_concurrency(self, sequences: int, of_request: int) -> None:
        """`of_request` sequences of the same request have been admitted."""
        most = self.key.limits.concurrent_requests
        if most is None or self._slots is None or self._slots.permits(sequences):
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

    def _check_rate(self, meter: RateMeter | None, now: float, requests: int = 1) -> None:
        """A request that counts for more than a second's worth is admitted when that is there, and the next ones wait longer."""
        if meter is None:
            return
        if (wait_s := meter.wait_s(min(requests, meter.size), now)) > 0:
            limit = self.key.limits.requests_per_s
            raise RateLimited(f"the API key '{self.key.name}' may send {limit:g} requests per second", retry_after_s=wait_s)


class _Running:
    __slots__ = ("kept", "request", "sequences")

    def __init__(self, request: object) -> None:
        self.request = request  # kept, so that no other object gets its id
        self.sequences = 0
        self.kept = 0
        """Sequences for which there is a place, and of which no part has begun yet."""


class Ticket:
    """A request, or a part of one, that counts against an account until it is closed; a context manager that closes it."""

    __slots__ = ("_account", "_reserved", "_running", "_sequences", "is_counted")

    def __init__(self, account: KeyAccount | None, running: _Running | None, sequences: int) -> None:
        """Without an account nothing is counted."""
        self.is_counted = account is not None
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
        """Count tokens read or generated, as soon as their number is known; a negative number corrects an earlier one."""
        if self._account is None:
            return
        self._reserved -= tokens
        if self._reserved < 0:
            self._account.take_tokens(-self._reserved)
            self._reserved = 0

    def close(self) -> None:
        """End the request, or the part of it. Calls after the first have no effect."""
        account, self._account = self._account, None
        if account is not None:
            account.part_over(self._running, self._sequences)
            if self._reserved:
                account.take_tokens(-self._reserved)


_UNCOUNTED = Ticket(None, None, 0)


class OpenStream:
    """A stream that counts against an account until the context is left."""

    __slots__ = ("_account",)

    def __init__(self, account: KeyAccount | None) -> None:
        """Without an account nothing is counted."""
        self._account = account

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._account is not None:
            self._account.stream_closed()


class AnonymousAccount:
    """The account of callers that need no key: it permits every model and has no limits."""

    __slots__ = ()

    name = ""
    weight = 1.0
    max_priority = MAX_PRIORITY
    models = ALL_MODELS

    isolate = staticmethod(salt_without_key)

    def permits(self, model: str) -> bool:
        return True

    def permit(self, model: str) -> None:
        pass

    def admit(self, model: str, request: object, sequences: int = 1, of: int = 0) -> Ticket:
        return _UNCOUNTED

    def check_limits(self) -> None:
        pass

    def check_tokens(self) -> None:
        pass

    def occupy(self) -> Ticket:
        return _UNCOUNTED

    def open_stream(self) -> OpenStream:
        return OpenStream(None)

    def take_calls(self, calls: int) -> None:
        pass

    def take_tokens(self, tokens: int) -> None:
        pass

    def record(self, model: str, usage: UsageCounts) -> None:
        pass

    def rate_limits(self) -> Sequence[RateLimit]:
        return ()


class OpenAccount(AnonymousAccount):
    """The account of callers without a key where others have keys: none goes before these."""

    __slots__ = ()

    max_priority = 0


ANONYMOUS = AnonymousAccount()
WITHOUT_KEY = OpenAccount()
