"""Bounds and intervals of the request plane. Both sides of a deployment may differ in them; none is agreed on the wire."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

FRAME_COST = 16
"""Bytes that a frame counts against a window beyond its body, so that empty bodies are bounded too."""
COPIED_AT_ONCE_BYTES = 8 * MIB
"""A larger body is copied into shared memory in steps, beside other work of the event loop, and leaves when it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """What one process allows itself and its peers. Sizes in bytes, times in seconds."""

    chunk_bytes: int = 512 * KIB
    """Longer bodies are cut. Lowered to what the server's `max_payload` lets through."""
    first_flight_bytes: int = MIB
    """Bytes of a request body that are sent without waiting for credit."""
    unacknowledged_bytes: int = 4 * MIB
    """Per caller and instance: request bytes sent without credit that the instance has not reacted to yet. Past it, bodies wait.

    An instance with many callers lets each have less, so that all of them stay within half of its budget."""
    first_unacknowledged_bytes: int = MIB
    """The same until the instance has sent its own bound."""
    budget_bytes: int = 32 * MIB
    """What a process lets all its peers together have on the way to it. nats-server cuts a connection at 64 MiB unread."""
    window_bytes: int = 8 * KIB
    """The window of a response among few; larger responses get credit on demand."""
    least_window_bytes: int = 48
    """The window of a response among very many: two tokens."""
    kept_credit_bytes: int = MIB
    """Credit on demand that a stream gets anew when it has used some, or at its start if responses were large before, while there
    is plenty."""
    max_body_bytes: int = 512 * MIB
    """Longer request or response bodies are refused."""
    max_buffered_bytes: int = 1024 * MIB
    """Request bodies held by one instance, and incomplete responses held by one caller; more is refused as overload."""
    max_open_requests: int = 4096
    """Requests open at one instance; more is refused as overload."""
    beat_s: float = 0.5
    """Interval in which a worker lists the silent requests that it still works on."""
    probe_after_s: float = 1.25
    """A stream that was silent this long is probed: longer than two beats, since a request that has just sent skips one."""
    gone_after_s: float = 5.0
    """An instance that did not respond to probes for this long is taken as gone."""
    reconnect_grace_s: float = 5.0
    """After an own reconnect, a caller without subscription may still be reconnecting, and keeps its requests."""
    absent_grace_s: float = 1.0
    """A peer whose subscription is missing gets this long to come back, as after a reconnect of its own."""
    keepalive_s: float = 5.0
    """A caller with open requests says that it is there at least this often."""
    caller_gone_after_s: float = 30.0
    """The requests of a caller that sent nothing for this long are cancelled."""
    peer_kept_s: float = 60.0
    """An instance without streams is kept in mind this long."""
    max_head_bytes: int = 32 * KIB
    """Verb and headers of a request; longer ones are refused."""
    max_error_chars: int = 4 * KIB
    """Longer texts of errors are cut."""
