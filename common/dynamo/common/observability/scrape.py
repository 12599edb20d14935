"""The text that Prometheus reads, rendered beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from dynamo.common.observability.tally import Tally
from dynamo.common.observability.telemetry import render
from dynamo.common.process.background import awaited


class Scraper:
    """Renders the metrics of a registry, and of other processes if they keep theirs in `folder`."""

    def __init__(self, registry: CollectorRegistry, tallies: Sequence[Tally], folder: str | None = None) -> None:
        self._registry = registry
        self._tallies = tallies
        self._folder = folder
        self._running: asyncio.Task[tuple[bytes, str]] | None = None

    async def scrape(self) -> tuple[bytes, str]:
        """Return the text of a scrape and its content type.

        It is made on another thread, since it may take a fifth of a second. Scrapes that come meanwhile get the same text.
        """
        if self._running is None or self._running.done():
            for tally in self._tallies:
                tally.flush()
            self._running = awaited(asyncio.to_thread(render, self._registry, self._folder), "scrape")
        return await asyncio.shield(self._running)
