"""The real etcd and nats-server for tests: on free ports, ready, stopped at the end, their logs shown on failure.

`async with start_etcd(tmp_path / "etcd") as etcd:` gives a test a server of its own, which it may `kill()`, `stop()`
and `restart()`. Tests that only need one to be there take the fixtures `etcd_server`, `nats_server` and `namespace`.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from dynamo.local.servers import EtcdServer, NatsServer, Server, ServerTls, etcd_binary, free_ports

__all__ = [
    "ETCD_FLAGS",
    "EtcdServer",
    "NatsServer",
    "Server",
    "ServerTls",
    "etcdctl",
    "free_ports",
    "serving",
    "start_etcd",
    "start_nats",
]

ETCD_FLAGS = ("--grpc-keepalive-min-time", "100ms", "--heartbeat-interval", "20", "--election-timeout", "200")
"""A client may ping as often as a test likes; a restart takes 0.3 s and not 1.5; and a lease may be as short as 1 s."""

S = TypeVar("S", bound=Server)


@asynccontextmanager
async def start_etcd(
    folder: Path, *, port: int = 0, tls: ServerTls | None = None, extra_flags: Sequence[str] = ()
) -> AsyncIterator[EtcdServer]:
    """etcd for the body; may be killed and restarted there."""
    flags = [*ETCD_FLAGS, *extra_flags]
    async with _running(EtcdServer(folder, port=port, tls=tls, fsync=False, extra_flags=flags)) as server:
        yield server


@asynccontextmanager
async def start_nats(
    folder: Path,
    *,
    port: int = 0,
    jetstream: bool = True,
    max_payload_bytes: int | None = None,
    tls: ServerTls | None = None,
    config: str = "",
) -> AsyncIterator[NatsServer]:
    """nats-server for the body, with the default limits unless told otherwise; may be killed and restarted there."""
    async with _running(
        NatsServer(folder, port=port, jetstream=jetstream, max_payload_bytes=max_payload_bytes, tls=tls, config=config)
    ) as server:
        yield server


@asynccontextmanager
async def _running(server: S) -> AsyncIterator[S]:
    try:
        await server.start()
        yield server
    except BaseException as error:
        error.add_note(f"--- end of {server.log_file} ---\n{server.log()}")
        raise
    finally:
        await server.stop()


@contextmanager
def serving(server: S) -> Iterator[S]:
    """The same for fixtures of a whole session, which outlive every event loop of a test."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(server.start())
        yield server
    finally:
        loop.run_until_complete(server.stop())
        loop.close()


def etcdctl(endpoint: str, *arguments: str) -> str:
    """Output of etcd's own command-line client: an opinion independent of ours. Blocks for some ten milliseconds."""
    command = [str(etcd_binary().with_name("etcdctl")), "--endpoints", endpoint, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
