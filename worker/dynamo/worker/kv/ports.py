"""Ports for KV events, which an engine binds long after they were chosen: once it has loaded its model."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from dynamo.common.errors import EngineError

_TRIES = 50
_FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(wanted: int) -> int:
    """Return the first of `wanted` consecutive free ports. Raises EngineError if there are none.

    They lie below the range that the system takes ports of connections from, of which the ranks of an engine make many while they
    load, and are drawn at random, so that workers that start together hardly draw the same.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) - wanted if _EPHEMERAL.exists() else 2 * _FIRST
    for _ in range(_TRIES):
        first = random.randrange(_FIRST, max(end, _FIRST + 1))
        with ExitStack() as stack:
            try:
                for port in range(first, first + wanted):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise EngineError(f"there are no {wanted} free ports in a row for KV events")
