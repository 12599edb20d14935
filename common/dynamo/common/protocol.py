"""The version of what frontends and workers send one another: registrations, frames, verbs, bodies, KV events, load reports.

A worker registers its version. A frontend leaves out what is more than one version apart; so neither gets anything from a process
that it would misread, since only frontends begin to speak. What has a field that the reader does not know is read without it.
"""

from __future__ import annotations

from dynamo.common.errors import InvalidRequest

PROTOCOL = 1
"""Raised by a change that processes of the version before would misread. Those that have the change do as before with these."""
UNNAMED = 1
"""The version of workers that register none."""


class OtherProtocol(InvalidRequest):
    """A process is more than one version apart."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"it speaks version {protocol} of the protocol, and this process version {PROTOCOL}: at most one apart")
        self.protocol = protocol


def check_protocol(protocol: int) -> None:
    """Raise OtherProtocol for a version that this process does not speak."""
    if abs(protocol - PROTOCOL) > 1:
        raise OtherProtocol(protocol)
