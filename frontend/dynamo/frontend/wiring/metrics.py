"""The metrics of a frontend process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo.common.config import project_version
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.observability.scrape import Scraper
from dynamo.common.observability.telemetry import LinkMetrics, RuntimeMetrics, SharedMemoryMetrics, make_registry
from dynamo.common.process.background import running
from dynamo.frontend.api.http.management.server import Links, LinkState
from dynamo.frontend.metrics import EventMetrics, FrontendMetrics
from dynamo.frontend.port_metrics import GrpcServerMetrics, PickerMetrics, connection_metrics
from dynamo.frontend.router_metrics import RouterMetrics
from dynamo.frontend.security.sharing import Fleet

_WATCH_S = 1.0
_FLUSH_S = 0.2


class Metrics:
    """One registry and what counts into it.

    With `folder` this is one of several processes that keep their metrics there: a scrape by any of them adds all of them up.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._registry = make_registry()
        self.frontend = FrontendMetrics(self._registry)
        self.grpc = GrpcServerMetrics(self._registry)
        self.http_connections, self.grpc_connections = connection_metrics(self._registry)
        self.router = RouterMetrics(self.frontend)
        self.picker = PickerMetrics(self._registry)
        self.link = LinkMetrics(self._registry, "dynamo_frontend")
        self.memory = SharedMemoryMetrics(self._registry, "dynamo_frontend")
        self.events = EventMetrics(self._registry)
        self.runtime = RuntimeMetrics(self._registry, role="frontend", version=project_version())
        self._tallies = (self.frontend.tally, self.grpc.tally)
        self._scraper = Scraper(self._registry, self._tallies, folder)

    async def scrape(self) -> tuple[bytes, str]:
        """Return the text of a scrape and its content type."""
        return await self._scraper.scrape()

    @asynccontextmanager
    async def following(self, links: Links, limits: Fleet | None) -> AsyncIterator[None]:
        """Keep the metrics about `links` current, and add up for other processes what this one counted, while the body runs."""
        tallies = () if self._folder is None else self._tallies

        async def follow() -> None:
            while True:
                self.runtime.etcd_stale.set(links.etcd_state is not LinkState.CONNECTED)
                self.runtime.nats_connected.set(links.nats_state is LinkState.CONNECTED)
                self.http_connections.show()
                self.grpc_connections.show()
                self.events.show(lag_s=links.events.lag_s, is_dropped=links.events.is_dropped)
                if limits is not None:
                    self.frontend.limit_processes.set(1 + limits.others)
                for tally in tallies:
                    tally.flush()
                await asyncio.sleep(_FLUSH_S if tallies else _WATCH_S)

        try:
            async with running(follow(), "metrics"), running(self.link.measure_lag(), "lag of the event loop"):
                yield
        finally:
            for tally in tallies:
                tally.flush()

    async def follow(self, client: RequestClient) -> None:
        """Keep the metrics about requests on NATS current until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self.link.show(clock(), open_streams=client.open_streams, free_credit_bytes=client.free_budget_bytes)
            self.memory.show(client.memory)
            await asyncio.sleep(_WATCH_S)
