"""Ports for KV events are free, in a row, and none that the system gives to connections."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from dynamo.worker.kv.ports import free_ports


def test_ports_are_free_and_none_that_a_connection_could_get() -> None:
    first = free_ports(8)
    least_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first + 8 <= least_ephemeral
    with ExitStack() as stack:
        for port in range(first, first + 8):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
