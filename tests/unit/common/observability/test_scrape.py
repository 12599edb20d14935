"""Scrapes are rendered beside the event loop."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.registry import Collector

from dynamo.common.observability.scrape import Scraper
from dynamo.common.observability.tally import Tally


class Witness(Collector):
    """Keeps the threads on which it is collected."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def collect(self) -> list[Metric]:
        self.threads.append(threading.get_ident())
        return []


async def test_readings_are_taken_on_the_event_loop_and_rendered_beside_it() -> None:
    registry, readers = CollectorRegistry(), []
    tally, witness = Tally(registry), Witness()

    def read() -> float:
        readers.append(threading.get_ident())
        return 7.0

    tally.show(Gauge("level", "l", registry=registry), read)
    registry.register(witness)
    witness.threads.clear()
    text, _ = await Scraper(registry, (tally,)).scrape()
    assert b"level 7.0" in text
    assert readers == [threading.get_ident()]
    assert witness.threads != readers


async def test_scrapes_that_come_meanwhile_get_the_same_text() -> None:
    registry = CollectorRegistry()
    scraper = Scraper(registry, (Tally(registry),))
    first, second = await asyncio.gather(scraper.scrape(), scraper.scrape())
    assert first is second
    assert await scraper.scrape() is not first
