"""Credit of the request plane: how much of a process's budget each stream may have on the way.

nats-server cuts a connection whose unread bytes pass its limit, so what all peers together may send to one process has a bound.
Half of the budget for responses is shared as *windows*, which return as they are used: they are small, since the tokens of a text
are, and the smaller the more streams there are. The other half is lent *on demand*: an instance that waits for credit says how
much it needs, and gets it in turns. Bodies of requests have only the latter kind, besides what is sent without waiting.
"""

from __future__ import annotations

from typing import Protocol

from dynamo.common.messaging.request_plane.limits import PlaneLimits

_SHARES = 8
"""One grant is at most this part of the budget, so that one stream does not take all of it."""
_LEAST_GRANT_BYTES = 16 * 1024
"""Less is not granted to a stream that needs more: crumbs of many streams, too small to be used, would use up the budget."""
_MESSAGE_COST = 8
"""Bytes that nats-server may hold for a byte of a window. A frame of one token counts some 20, but if it is the only one in its
message, subjects are added, which makes 160."""


class Borrower(Protocol):
    """A stream that waits for credit. It is hashed by identity."""

    def grant(self, size: int) -> None:
        """`size` more bytes may be sent. It must not borrow in this call."""
        ...


class CreditQueue:
    """Lends a budget on demand, in turns."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._free = budget
        self._max_share = budget // _SHARES
        self._waiting: dict[Borrower, int] = {}
        """How many bytes each still needs, in the order of their turns."""

    def __repr__(self) -> str:
        return f"<CreditQueue free={self._free} of {self._budget}, waiting={len(self._waiting)}>"

    @property
    def free_bytes(self) -> int:
        return self._free

    @property
    def lent_bytes(self) -> int:
        return self._budget - self._free

    @property
    def is_plentiful(self) -> bool:
        """Whether more than half is free: then credit may also be lent to those who may not use it."""
        return self._free * 2 > self._budget

    def request(self, borrower: Borrower, size: int) -> None:
        """Let `borrower` have `size` bytes when it is its turn, in place of what it has requested and not got."""
        self._waiting[borrower] = size
        self._grant()

    def take_spare(self, size: int) -> int:
        """Return `size` and count it as lent if more than half of the budget stays free, else 0."""
        if (self._free - size) * 2 <= self._budget:
            return 0
        self._free -= size
        return size

    def release(self, size: int) -> None:
        """Take back what a borrower has used."""
        self._free += size
        self._grant()

    def forget(self, borrower: Borrower, unused: int) -> None:
        """Take back what a borrower that is over has not used; grant it nothing more."""
        self._waiting.pop(borrower, None)
        if unused:
            self.release(unused)

    def _grant(self) -> None:
        while self._waiting:
            borrower = next(iter(self._waiting))
            size = self._waiting[borrower]
            share = min(size, self._max_share)
            if self._free <= 0 or self._free < min(share, _LEAST_GRANT_BYTES):
                return
            share = min(share, self._free)
            del self._waiting[borrower]
            self._free -= share
            if size > share:
                self._waiting[borrower] = size - share
            borrower.grant(share)


class ResponseCredits:
    """The budget for all responses to one process."""

    def __init__(self, limits: PlaneLimits) -> None:
        self._budget = limits.budget_bytes // 2 // _MESSAGE_COST
        self._reserve = max(1, self._budget // 2)
        """Part of the budget for windows that is left to windows of the least size."""
        self._free = self._budget
        self._window_bytes = limits.window_bytes
        self._least_bytes = limits.least_window_bytes
        self.max_kept_bytes = limits.kept_credit_bytes
        self.on_demand = CreditQueue(limits.budget_bytes - self._budget * _MESSAGE_COST)

    def __repr__(self) -> str:
        return f"<ResponseCredits free={self._free} of {self._budget} for windows, {self.on_demand!r}>"

    @property
    def free_bytes(self) -> int:
        return self._free * _MESSAGE_COST + self.on_demand.free_bytes

    @property
    def lent_bytes(self) -> int:
        """What streams hold, as nats-server would count it."""
        return (self._budget - self._free) * _MESSAGE_COST + self.on_demand.lent_bytes

    @property
    def window_bytes(self) -> int:
        """The window of a stream at present: a fixed part of what is free, so that none is left out however many there are.

        Switches share the memory of their queues so (dynamic thresholds, Choudhury and Hahne 1998).
        """
        spare = max(0, self._free - self._reserve)
        return min(self._least_bytes + self._window_bytes * spare // self._reserve, self._free)

    def reserve(self, size: int) -> None:
        """Take `size` bytes, or give them back if negative, for a window."""
        self._free -= size


class StreamCredit:
    """What one stream may still send, and what of its response is not read yet."""

    __slots__ = ("_credits", "borrowed", "used", "window")

    def __init__(self, credits_: ResponseCredits, expected_bytes: int) -> None:
        """Begin with credit for a response of `expected_bytes` if there is plenty."""
        self._credits = credits_
        self.window = credits_.window_bytes
        """Bytes that return to the stream when they are used; below 0 if it has overdrawn them by the cost of a frame."""
        credits_._free -= self.window
        self.borrowed = 0
        """Bytes on demand."""
        self.used = 0
        """Bytes that have been read."""
        if expected_bytes > self.window:
            self.borrowed = credits_.on_demand.take_spare(min(expected_bytes, credits_.max_kept_bytes))

    def __repr__(self) -> str:
        return f"<StreamCredit used={self.used}, window={self.window}, borrowed={self.borrowed}>"

    @property
    def bytes(self) -> int:
        """What it holds of the budget."""
        return max(0, self.window) + self.borrowed

    @property
    def allowed(self) -> int:
        """How many bytes the stream may have sent in total."""
        return self.used + self.window + self.borrowed

    def use(self, size: int) -> None:
        """Note that `size` bytes have been read, and let the stream send others in their place as far as the budget goes.

        What this gives back may be granted to any stream that waits for it, also to this one.
        """
        credits_ = self._credits
        self.used += size
        repaid = min(size, self.borrowed)
        kept = 0
        if repaid:
            if credits_.on_demand.is_plentiful:
                kept = max(0, min(repaid, credits_.max_kept_bytes - self.borrowed + repaid))
            self.borrowed -= repaid - kept
        former = max(0, self.window)
        self.window -= size - repaid
        credits_.reserve(max(0, self.window) - former)
        added = max(0, credits_.window_bytes - self.window)
        credits_.reserve(max(0, self.window + added) - max(0, self.window))
        self.window += added
        if repaid > kept:
            credits_.on_demand.release(repaid - kept)

    def close(self, borrower: Borrower) -> None:
        """Give everything back."""
        self._credits._free += max(0, self.window)
        borrowed, self.window, self.borrowed = self.borrowed, 0, 0
        self._credits.on_demand.forget(borrower, borrowed)
