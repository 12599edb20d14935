"""What errors of JetStream say to an operator."""

from __future__ import annotations

from nats.js.errors import ServiceUnavailableError


def reason_of(error: Exception) -> str:
    """Return why an operation failed; nats-py's error says nothing where nothing responds to JetStream's subjects."""
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        return "nats-server runs without JetStream, which its flag -js begins"
    return str(error) or type(error).__name__
