"""The real etcd and nats-server for tests: on free ports, ready, stopped at the end, their logs shown on failure.

`async with start_etcd(tmp_path / "etcd") as etcd:` gives a test a server of its own, which it may `kill()`, `stop()`
and `restart()`. Tests that only need one to be there take the fixtures `etcd_server`, `nats_server` and `namespace`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import httpx2

from dynamo.common.process.ports import free_ports
from dynamo.local.servers import EtcdServer, NatsServer, Server, ServerTls, etcd_binary
from tests.support.waiting import expiring

__all__ = [
    "ETCD_FLAGS",
    "LASTING_ETCD_FLAGS",
    "Cluster",
    "EtcdServer",
    "NatsServer",
    "Server",
    "ServerTls",
    "etcdctl",
    "serving",
    "start_etcd",
    "start_etcd_cluster",
    "start_nats",
    "start_nats_cluster",
]

ETCD_FLAGS = ("--grpc-keepalive-min-time", "100ms", "--heartbeat-interval", "20", "--election-timeout", "200")
"""A client may ping as often as a test likes; a restart takes 0.3 s and not 1.5; and a lease may be as short as 1 s."""

LASTING_ETCD_FLAGS = (*ETCD_FLAGS, "--heartbeat-interval", "60", "--election-timeout", "600")
"""Leases may be as short, a start takes 0.2 s longer, and beating less often an idle server takes half of the CPU time."""

_START_TIMEOUT_S = 120
"""Longer than a deployment would wait: a start on a busy machine takes longer than it would permit."""
_LEADER_TIMEOUT_S = 120
_POLL_S = 0.05

S = TypeVar("S", bound=Server)


@asynccontextmanager
async def start_etcd(
    folder: Path, *, port: int = 0, tls: ServerTls | None = None, fsync: bool = False, extra_flags: Sequence[str] = ()
) -> AsyncIterator[EtcdServer]:
    """etcd for the body; may be killed and restarted there. Without `fsync` a kill may lose what was written just before."""
    flags = [*ETCD_FLAGS, *extra_flags]
    async with _running(EtcdServer(folder, port=port, tls=tls, fsync=fsync, extra_flags=flags)) as server:
        yield server


@asynccontextmanager
async def start_nats(
    folder: Path,
    *,
    port: int = 0,
    jetstream: bool = True,
    max_payload_bytes: int | None = None,
    tls: ServerTls | None = None,
    fsync: bool = True,
    config: str = "",
) -> AsyncIterator[NatsServer]:
    """nats-server for the body, with the default limits unless told otherwise; may be killed and restarted there."""
    server = NatsServer(
        folder, port=port, jetstream=jetstream, max_payload_bytes=max_payload_bytes, tls=tls, fsync=fsync, config=config
    )
    async with _running(server):
        yield server


@asynccontextmanager
async def _running(server: S) -> AsyncIterator[S]:
    try:
        await server.start(_START_TIMEOUT_S)
        yield server
    except BaseException as error:
        error.add_note(f"--- end of {server.log_file} ---\n{server.log()}")
        raise
    finally:
        await server.stop()


@dataclass(frozen=True)
class Cluster(Generic[S]):
    """Three servers of one kind that form a cluster. Each may be killed and restarted."""

    servers: tuple[S, ...]
    find_leader: Callable[[], Awaitable[S]]
    """Return the server that leads now, of nats-server the leader of JetStream. Raises TimeoutError."""


@asynccontextmanager
async def start_nats_cluster(folder: Path) -> AsyncIterator[Cluster[NatsServer]]:
    """Three nats-servers for the body, with JetStream."""
    ports = free_ports(6)
    routes, monitors = ports[:3], ports[3:]
    async with _all_running(
        [NatsServer(folder / f"n{number}", config=_nats_member(number, routes, monitors)) for number in range(3)]
    ) as servers:

        async def find_leader() -> NatsServer:
            async with asyncio.timeout(_LEADER_TIMEOUT_S), httpx2.AsyncClient(timeout=expiring(1.0)) as client:
                while True:
                    for server, port in zip(servers, monitors, strict=True):
                        with suppress(httpx2.TransportError):
                            url = f"http://127.0.0.1:{port}"
                            name = (await client.get(f"{url}/varz")).json()["server_name"]
                            if (await client.get(f"{url}/jsz")).json()["meta_cluster"].get("leader") == name:
                                return server
                    await asyncio.sleep(_POLL_S)

        yield Cluster(servers, find_leader)


def _nats_member(number: int, ports: Sequence[int], monitors: Sequence[int]) -> str:
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    cluster = f'cluster {{ name: "test", listen: "127.0.0.1:{ports[number]}", routes: [{routes}] }}'
    return f'{cluster}\nhttp: "127.0.0.1:{monitors[number]}"\n'


@asynccontextmanager
async def start_etcd_cluster(folder: Path) -> AsyncIterator[Cluster[EtcdServer]]:
    """An etcd of three members for the body."""
    peers = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
    members = [
        EtcdServer(folder / f"m{number}", fsync=False, extra_flags=[*ETCD_FLAGS, *_etcd_member(number, peers)])
        for number in range(3)
    ]
    async with _all_running(members) as servers:

        async def find_leader() -> EtcdServer:
            async with asyncio.timeout(_LEADER_TIMEOUT_S):
                while True:
                    for server in servers:
                        with suppress(subprocess.CalledProcessError):
                            text = await asyncio.to_thread(etcdctl, server.endpoint, "endpoint", "status", "-w", "json")
                            [status] = [entry["Status"] for entry in json.loads(text)]
                            if status["leader"] == status["header"]["member_id"]:
                                return server
                    await asyncio.sleep(_POLL_S)

        yield Cluster(servers, find_leader)


def _etcd_member(number: int, peers: Sequence[str]) -> list[str]:
    """The flags that make a member of a cluster of what EtcdServer starts: of a flag given twice etcd takes the last."""
    return [
        *("--name", f"m{number}", "--listen-peer-urls", peers[number], "--initial-advertise-peer-urls", peers[number]),
        *("--initial-cluster", ",".join(f"m{other}={peer}" for other, peer in enumerate(peers))),
    ]


@asynccontextmanager
async def _all_running(servers: Sequence[S]) -> AsyncIterator[tuple[S, ...]]:
    async with AsyncExitStack() as stack:  # started side by side: a member is ready when the cluster has a leader
        yield tuple(await asyncio.gather(*(stack.enter_async_context(_running(server)) for server in servers)))


@contextmanager
def serving(server: S) -> Iterator[S]:
    """The same for fixtures of a whole session, which outlive every event loop of a test."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(server.start(_START_TIMEOUT_S))
        yield server
    finally:
        loop.run_until_complete(server.stop())
        loop.close()


def etcdctl(endpoint: str, *arguments: str) -> str:
    """Output of etcd's own command-line client: an opinion independent of ours. Blocks for some ten milliseconds."""
    command = [str(etcd_binary().with_name("etcdctl")), "--endpoints", endpoint, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
