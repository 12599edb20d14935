"""Bounds and intervals of the request plane. Both sides of a deployment may differ in them; none is agreed on the wire."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

FRAME_COST = 16
"""Bytes that a frame counts against a window beyond its body, so that empty bodies are bounded too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """What one process allows itself and its peers. Sizes in bytes, times in seconds."""

    chunk_bytes: int = 512 * KIB
    """Longer bodies are cut. Lowered to what the server's `max_payload` lets through."""
    first_flight_bytes: int = MIB
    """Of a request body, sent without waiting for credit."""
    unacknowledged_bytes: int = 4 * MIB
    """Per instance: request bytes sent without credit to an instance that has not reacted to them yet. Past it, bodies wait."""
    budget_bytes: int = 32 * MIB
    """What a process lets all its peers together have on the way to it. nats-server cuts a connection at 64 MiB unread."""
    window_bytes: int = MIB
    """The first window of a response, while the budget lasts."""
    window_floor_bytes: int = 16 * KIB
    """The first window of a response when the budget is used up."""
    max_body_bytes: int = 512 * MIB
    """Longer request or response bodies are refused."""
    max_buffered_bytes: int = 1024 * MIB
    """Request bodies held by one instance; more is refused as overload."""
    max_open_requests: int = 4096
    """Requests open at one instance; more is refused as overload."""
    beat_s: float = 1.0
    """Interval in which a worker lists the silent requests that it still works on."""
    probe_after_s: float = 2.0
    """A stream that was silent this long is probed."""
    gone_after_s: float = 5.0
    """An instance that did not respond to probes for this long is taken as gone."""
    reconnect_grace_s: float = 5.0
    """After an own reconnect, a peer without subscription may still be reconnecting."""
    absent_grace_s: float = 1.0
    """A peer whose subscription is missing gets this long to come back, as after a short reconnect of its own."""
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
