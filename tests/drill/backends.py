"""The etcd and the NATS of a drill, single or as clusters of three, and the links by which one process reaches them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.proxy import Proxy, start_proxy
from tests.support.servers import EtcdServer, NatsServer, start_etcd, start_etcd_cluster, start_nats, start_nats_cluster


@dataclass(frozen=True)
class Backends:
    """Servers, with functions that return the leader of each kind."""

    etcd: tuple[EtcdServer, ...]
    nats: tuple[NatsServer, ...]
    etcd_leader: Callable[[], Awaitable[EtcdServer]]
    nats_leader: Callable[[], Awaitable[NatsServer]]


@asynccontextmanager
async def single(folder: Path) -> AsyncIterator[Backends]:
    """One etcd and one nats-server for the body."""
    async with start_etcd(folder / "etcd") as etcd, start_nats(folder / "nats") as nats:

        async def the_etcd() -> EtcdServer:
            return etcd

        async def the_nats() -> NatsServer:
            return nats

        yield Backends((etcd,), (nats,), the_etcd, the_nats)


@asynccontextmanager
async def clustered(folder: Path) -> AsyncIterator[Backends]:
    """Three etcds and three nats-servers for the body."""
    async with start_etcd_cluster(folder / "etcd") as etcd, start_nats_cluster(folder / "nats") as nats:
        yield Backends(etcd.servers, nats.servers, etcd.find_leader, nats.find_leader)


@dataclass(frozen=True)
class Links:
    """How one process reaches its servers: through one proxy to each of them."""

    etcd: tuple[Proxy, ...]
    nats: tuple[Proxy, ...]

    @property
    def endpoint(self) -> str:
        """The addresses of etcd, in the place of an EtcdServer's."""
        return ",".join(f"http://127.0.0.1:{proxy.port}" for proxy in self.etcd)

    @property
    def url(self) -> str:
        """The addresses of NATS, in the place of a NatsServer's."""
        return ",".join(f"nats://127.0.0.1:{proxy.port}" for proxy in self.nats)


async def open_links(backends: Backends, stack: AsyncExitStack) -> Links:
    async def proxy(url: str) -> Proxy:
        port = urlsplit(url).port
        assert port is not None
        return await stack.enter_async_context(start_proxy(port))

    etcd = [await proxy(server.endpoint) for server in backends.etcd]
    nats = [await proxy(server.url) for server in backends.nats]
    return Links(tuple(etcd), tuple(nats))
