"""How the parts of a frontend are put together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.observability import scrape as scraping
from dynamo.frontend.api.http.management.server import LinkState
from dynamo.frontend.config import FrontendConfig, RouterOptions, Thresholds
from dynamo.frontend.metrics import RequestTimer, RequestType
from dynamo.frontend.wiring.links import Links
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.routing import make_control


async def test_a_scrape_is_made_on_another_thread_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    render = scraping.render

    def noted(*arguments: Any) -> tuple[bytes, str]:
        threads.append(threading.get_ident())
        return render(*arguments)

    monkeypatch.setattr(scraping, "render", noted)
    metrics = Metrics()
    RequestTimer(metrics.frontend.for_model("m"), "tensor", RequestType.UNARY).finish()
    first, second = await asyncio.gather(metrics.scrape(), metrics.scrape())
    assert first is second and len(threads) == 1 and threads[0] != threading.get_ident()
    assert b'dynamo_frontend_request_duration_seconds_count{model="m"} 1.0' in first[0], "what was counted up to then is in it"
    assert await metrics.scrape() is not first


async def test_a_scraper_that_leaves_takes_the_scrape_from_no_one() -> None:
    metrics = Metrics()
    leaving, staying = asyncio.create_task(metrics.scrape()), asyncio.create_task(metrics.scrape())
    await asyncio.sleep(0)
    leaving.cancel()
    text, _ = await staying
    assert b"dynamo_runtime_info" in text


async def test_before_nats_is_reached_links_say_so_and_nothing_can_be_changed() -> None:
    links = Links()
    control = make_control(RouterOptions(thresholds=Thresholds(active_prefill_tokens=1)), links)
    assert (links.nats, links.etcd, control.follows_loads) == (LinkState.CONNECTING, LinkState.CONNECTING, True)
    with pytest.raises(Unavailable, match="no connection to NATS yet"):
        control.set_thresholds("m", Thresholds())
    with pytest.raises(Unavailable, match="no connection to NATS yet"):
        await links.subscribe("subject", lambda *_: None)


def test_the_options_of_a_frontend_are_those_that_its_parts_take() -> None:
    config = FrontendConfig()
    assert config.serving.retry.max_attempts == 5 and config.serving.retry.burst == 1000
    assert config.router.kv.overlap_score_weight == 4.0 and config.text.limits.max_stop_strings == 32
