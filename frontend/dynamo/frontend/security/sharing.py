"""The limits of an API key as one process sees them, while all processes of a fleet use them together.

A process knows its own use at once, and that of the others from what they publish: at the first use after a pause immediately,
and then every `REFRESH_S`. From both it has the fleet's level of each limit. How much of that it may use itself until it looks
again depends on who else wants some: its share is its part of the requests that came to the fleet lately, admitted or not. So
no request waits for another process, and a process that is the only one with requests has all of the limit.

What several processes take at the same moment may exceed a rate; their levels then go below zero, and the fleet waits longer.
A process that reaches no other one, itself included, keeps the share that it had. See docs/decisions/0012-fleet-wide-limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from dynamo.common.process.decaying import DecayingCounter

REFRESH_S = 0.05
"""How often a process publishes what it uses, and how long it uses a share before it looks again."""
ISOLATED_S = 1.5
"""A process that has not received a message for so long reaches no other one. It sends one to itself every second."""
_DEMAND_S = 1.0
"""A request of so long ago counts for 1/e in the demand."""
_SPARSE_REQUESTS = 0.5
"""While others expect fewer requests in `REFRESH_S`, what they use is known here before the next request comes."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Multiples of it are spread evenly between 0 and 1."""


Amount = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""A finite number: infinity and NaN are refused."""
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Use(msgspec.Struct, frozen=True, array_like=True):
    """What one process has used of a rate."""

    taken: Amount
    """Since the process started, so that a message that gets lost is made up for by the next one."""
    left: Amount
    """The fleet's level, as that process sees it."""


class KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """What one process has used of the limits of a key."""

    name: str
    demand: NonNegative
    metadata_demand: NonNegative
    in_use: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    requests: Use | None
    calls: Use | None
    tokens: Use | None


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What is left of one limit of an account."""

    kind: Literal["requests", "tokens"]
    size: int
    """What may be used at once after a pause."""
    remaining: int
    reset_s: float
    """Until all of `size` is there again."""


class Fleet:
    """The processes that share limits, as this one sees them."""

    def __init__(self, origin: str = "") -> None:
        """`origin` names this process."""
        self.origin = origin
        self.others = 0
        """Processes apart from this one that were heard lately."""
        self.connected_at = math.inf
        """When this process last received a message, if only its own; inf: it shares its limits with no other process."""
        self._on_used: Callable[[str], None] = _ignore

    def on_used(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the name of each key whose limits are used, or were too small for a request."""
        self._on_used = callback

    def used(self, name: str) -> None:
        self._on_used(name)

    def reached(self, now: float) -> None:
        """This process is connected to the others: a message has arrived, if only its own."""
        self.connected_at = now

    def found(self, others: int) -> None:
        """So many other processes were heard lately."""
        self.others = others

    def is_isolated(self, now: float) -> bool:
        """Return whether this process reaches no other one."""
        return now - self.connected_at > ISOLATED_S


def _ignore(name: str) -> None:
    """No other process uses the limits."""


class Shares:
    """This process's share of what is left of some limits, by the requests that came to each process lately."""

    def __init__(self, fleet: Fleet) -> None:
        self.round = 0
        """Increases whenever the share was determined anew."""
        self.share = 0.0
        self.is_alone = True
        """Whether all that is left may be used here: other processes have hardly any requests."""
        self.before = 0.0
        """The sum of the shares of the processes that come first in the order of their names."""
        self.is_isolated = False
        """Whether the share is the last one that this process had while it reached others."""
        self._expected_of_others = 0.0
        """Requests that others will have had before what they use is known here."""
        self._fleet = fleet
        self._own = DecayingCounter(_DEMAND_S)
        self._others: dict[str, DecayingCounter] = {}
        self._valid_until = -math.inf
        self._connected_at = -math.inf
        self._connected_share = 0.0
        """The share when others were reached for certain: later, their demand may have seemed to end."""

    def demand(self, now: float) -> float:
        return self._own.at(now)

    def is_alone_for(self, requests: int) -> bool:
        """Return whether all that is left may be used here by one with so many: others will hardly have that many meanwhile."""
        return self.is_alone or (not self.is_isolated and self._expected_of_others < _SPARSE_REQUESTS * requests)

    def requested(self, requests: int, now: float) -> None:
        """Count requests, whether or not they are admitted, and determine the share anew if it is old."""
        self._own.add(requests, now)
        if now >= self._valid_until:
            self._refresh(now)

    def apply(self, origin: str, demand: float, now: float) -> None:
        """Another process has this demand."""
        self._others[origin] = DecayingCounter(_DEMAND_S, demand, now)
        if self.is_alone:
            self._valid_until = now

    def forget(self, origin: str) -> None:
        self._others.pop(origin, None)

    def turn(self, amount: float, level: float, taken: float) -> float:
        """Return what this process may use beyond its part of a level, so that a whole `amount` gets out of the parts of all.

        Where each part is less than `amount`, one process has its turn for what the parts are together. All processes line
        the parts up in the same order, from the same beginning, which moves on with what all have `taken`. The process has its
        turn in whose part a multiple of `amount` lies.
        """
        position = self.before * max(level, 0.0) / amount + taken * _GOLDEN
        return position % 1.0 * amount

    def _refresh(self, now: float) -> None:
        self.round += 1
        self._valid_until = now + REFRESH_S
        self.is_isolated = self._fleet.is_isolated(now)
        if self.is_isolated:
            self.is_alone = False
            self.share = max(self._connected_share, 1.0 / (1 + self._fleet.others))
            return
        if self._connected_at != self._fleet.connected_at:
            self._connected_at, self._connected_share = self._fleet.connected_at, self.share
        own, others, before = self._own.at(now), 0.0, 0.0
        for origin, demand in self._others.items():
            amount = demand.at(now)
            others += amount
            if origin < self._fleet.origin:
                before += amount
        self.share, self.before = own / (own + others), before / (own + others)
        self._expected_of_others = others / _DEMAND_S * REFRESH_S
        self.is_alone = self._expected_of_others < _SPARSE_REQUESTS


class RateMeter:
    """A limit that fills by `rate` a second up to `size`; may be overdrawn, since the cost of a request is known at its end."""

    __slots__ = (
        "_filled_at",
        "_follows_level",
        "_own",
        "_round",
        "_seen",
        "_shares",
        "_taken_elsewhere",
        "level",
        "rate",
        "size",
        "taken",
    )

    def __init__(self, rate: float, size: float, shares: Shares, now: float) -> None:
        self.rate = rate
        self.size = size
        self.level = size
        """The fleet's."""
        self.taken = 0.0
        """By this process."""
        self._own = size
        """What this process may use, unless it is alone."""
        self._shares = shares
        self._round = 0
        self._follows_level = True
        self._filled_at = now
        self._seen: dict[str, float] = {}
        """What each other process had taken when it published that last."""
        self._taken_elsewhere = 0.0

    def wait_s(self, least: float, now: float) -> float:
        """Return the seconds until `least` may be used; 0 if it may."""
        self._renew(now)
        shares = self._shares
        by_level_s = max(0.0, (least - self.level) / self.rate)
        if shares.is_alone:
            return by_level_s
        if shares.is_isolated:
            return max(0.0, (least - self._own) / (self.rate * shares.share))
        missing = least - self._own - shares.turn(least, self.level, self.taken + self._taken_elsewhere)
        if missing <= 0:
            return by_level_s
        return max(by_level_s, min(missing / (self.rate * shares.share), self.size / self.rate))

    def full_in_s(self, now: float) -> float:
        """Return the seconds until all of `size` is there again."""
        self._renew(now)
        return max(0.0, (self.size - self.level) / self.rate)

    def left(self, kind: Literal["requests", "tokens"], now: float) -> RateLimit:
        """Return what the fleet has left."""
        reset_s = self.full_in_s(now)
        return RateLimit(kind, int(self.size), max(0, int(self.level)), reset_s)

    def take(self, amount: float, now: float) -> None:
        """Use an amount; a negative one is given back."""
        self._renew(now)
        self.taken += amount
        self.level -= amount
        self._own -= amount

    def resize(self, rate: float, size: float, now: float) -> None:
        self._renew(now)
        self.rate, self.size = rate, size
        self.level, self._own = min(self.level, size), min(self._own, size)

    def use(self) -> Use:
        return Use(self.taken, self.level)

    def apply(self, origin: str, use: Use, now: float) -> None:
        """Another process has used so much. Of one that is new here, only its level tells what was used before."""
        self._renew(now)
        seen = self._seen.get(origin)
        self._seen[origin] = use.taken
        self._taken_elsewhere += use.taken - (seen or 0.0)
        self.level = min(self.level, use.left) if seen is None else min(self.level - (use.taken - seen), self.size)

    def forget(self, origin: str) -> None:
        self._taken_elsewhere -= self._seen.pop(origin, 0.0)

    def _renew(self, now: float) -> None:
        elapsed_s = now - self._filled_at
        self._filled_at = now
        shares = self._shares
        self.level = min(self.size, self.level + elapsed_s * self.rate)
        self._own = min(self.size, self._own + elapsed_s * self.rate * shares.share)
        if self._round != shares.round:
            self._round = shares.round
            if self._follows_level or not shares.is_isolated:
                self._own = shares.share * self.level
            self._follows_level = not shares.is_isolated


class SlotMeter:
    """A limit on how many are in use at once."""

    __slots__ = ("_allowance", "_elsewhere", "_others", "_round", "_shares", "in_use", "limit")

    def __init__(self, limit: int, shares: Shares, in_use: int) -> None:
        self.limit = limit
        self.in_use = in_use
        """By this process."""
        self._elsewhere: dict[str, int] = {}
        self._others = 0
        self._shares = shares
        self._round = 0
        self._allowance = 0.0
        """What this process may use more than now, unless it is alone."""

    @property
    def may_be_full(self) -> bool:
        """Whether the fleet uses all, as far as this process knows."""
        return self._shares.is_isolated or self.in_use + self._others >= self.limit

    def permits(self, count: int) -> bool:
        """Return whether `count` more may be used."""
        shares = self._shares
        if shares.is_isolated and not shares.is_alone:
            return self.in_use == 0 or self.in_use + count <= shares.share * self.limit
        left = self.limit - self.in_use - self._others
        if count > left or shares.is_alone_for(count):
            return count <= left
        if self._round != shares.round:
            self._round = shares.round
            self._allowance = shares.share * left
        return self._allowance + shares.turn(count, left, self.in_use + self._others) >= count

    def take(self, count: int) -> None:
        self.in_use += count
        self._allowance -= count

    def give_back(self, count: int) -> None:
        # A process that has more than its share leaves what it gives back to all.
        if self.in_use <= self._shares.share * self.limit:
            self._allowance += count
        self.in_use -= count

    def apply(self, origin: str, in_use: int) -> None:
        """Another process uses so many."""
        self._others += in_use - self._elsewhere.get(origin, 0)
        self._elsewhere[origin] = in_use

    def forget(self, origin: str) -> None:
        self._others -= self._elsewhere.pop(origin, 0)
