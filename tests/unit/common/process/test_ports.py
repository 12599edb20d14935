"""Ports are free, in a row if wanted, none that the system gives to connections, and no other process draws them."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynamo.common.errors import Unsupported
from dynamo.common.process.ports import Ports, first_of_free_ports


def test_ports_are_free_and_none_that_a_connection_could_get() -> None:
    first = first_of_free_ports(8)
    assert first + 8 <= int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with ExitStack() as stack:
        for port in range(first, first + 8):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


@pytest.fixture
def three() -> range:
    """Three ports that are free."""
    first = first_of_free_ports(3)
    return range(first, first + 3)


def test_a_port_is_drawn_once(three: range, tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports", three)
    assert {ports.draw(), ports.draw(), ports.draw()} == set(three)
    with pytest.raises(Unsupported, match="no 1 free ports in a row were found"):
        ports.draw()


def test_a_port_that_a_server_listens_on_is_not_drawn(three: range, tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports", three)
    with socket.create_server(("127.0.0.1", three[1])):
        with pytest.raises(Unsupported):
            ports.draw(2)
        assert {ports.draw(), ports.draw()} == {three[0], three[2]}


def test_more_ports_in_a_row_than_there_are_is_an_error(three: range, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no 4 free ports"):
        Ports(tmp_path / "ports", three).draw(4)


_DRAW_TWO = """
import sys
from pathlib import Path
from dynamo.common.process.ports import Ports
ports = Ports(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[2]) + 3))
print(ports.draw(), ports.draw(), flush=True)
sys.stdin.read()
"""


def test_a_port_that_another_process_drew_is_its_own_until_it_ends(three: range, tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports", three)
    command = [sys.executable, "-c", _DRAW_TWO, str(tmp_path / "ports"), str(three[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        drawn = {int(port) for port in other.stdout.readline().split()}
        assert {ports.draw()} == set(three) - drawn
        with pytest.raises(Unsupported):
            ports.draw()
        other.communicate()
    assert {ports.draw(), ports.draw()} == drawn


def test_ports_drawn_long_ago_can_be_drawn_again(three: range, tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports", three, most_kept=2)
    oldest, _, _ = ports.draw(), ports.draw(), ports.draw()
    assert ports.draw() == oldest
