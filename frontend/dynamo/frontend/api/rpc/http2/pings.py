"""PINGs of one connection: which a client may send, and which are sent to see whether it lives."""

from __future__ import annotations

from time import monotonic
from typing import Final

from dynamo.frontend.api.rpc.http2.frames import ConnectionFailure, ErrorCode
from dynamo.frontend.config import GrpcOptions

_STRIKES: Final = 2
_LONG_INTERVAL_S: Final = 7200.0
"""Between pings of clients without calls, where these are not permitted: gRPC's, from TCP's interval."""


class Pings:
    """The server sends data by `responses`, of which it says how many there were."""

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self.sent_at: float | None = None
        """When a PING was sent that was not acknowledged."""
        self._sent = 0
        """Since the last response, of which there were `_responses_at_sent`."""
        self._responses_at_sent = 0
        self._strikes = 0
        self._received_at = 0.0
        self._responses_at_received = 0

    def is_overdue(self, now: float) -> bool:
        """Return whether the client has not acknowledged a PING in time."""
        return self.sent_at is not None and now - self.sent_at > self._options.keepalive_timeout_s

    def send(self, now: float, silent_s: float, responses: int, *, has_calls: bool) -> bool:
        """Return whether to send a PING now, and count it. `silent_s`: since something came from the client."""
        options = self._options
        if self.sent_at is not None or silent_s < options.keepalive_s:
            return False
        if responses != self._responses_at_sent:
            self._sent, self._responses_at_sent = 0, responses
        most = options.max_pings_without_data
        if not (has_calls or options.keepalive_permit_without_calls) or (most and self._sent >= most):
            return False
        self._sent += 1
        self.sent_at = now
        return True

    def received(self, responses: int, *, has_calls: bool) -> None:
        """Count a PING of the client. Raises ConnectionFailure if it sends too many.

        Clients measure the way by pings while data flows; without data, pings have a least interval.
        """
        now = monotonic()
        has_sent = responses != self._responses_at_received
        is_idle = not has_calls and not self._options.keepalive_permit_without_calls
        interval_s = _LONG_INTERVAL_S if is_idle else self._options.client_ping_interval_s
        if has_sent or not self._received_at or now - self._received_at >= interval_s:
            self._strikes = 0 if has_sent else self._strikes
        else:
            self._strikes += 1
        self._received_at, self._responses_at_received = now, responses
        if self._strikes > _STRIKES:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
