"""How the parts of a frontend are put together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast
from unittest.mock import MagicMock

import httpx2
import pytest

from dynamo.common.http.accepting import Descriptors
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.observability import scrape as scraping
from dynamo.common.options import NatsOptions
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.management.server import Links, LinkState
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.config import FrontendConfig, HttpOptions
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.metrics import RequestTimer, RequestType
from dynamo.frontend.wiring.http import open_http
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.parts import PortParts
from tests.support.fake_etcd import FakeEtcd
from tests.support.fake_records import FakeRecords


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


def unconnected() -> Links:
    nats = Connection(NatsOptions(), "test")
    return Links(cast(Any, None), Directory(cast(Any, FakeEtcd()), "ns"), nats, nats, EventBus(nats))


async def test_links_say_that_they_connect_until_nats_and_etcd_are_reached() -> None:
    links = unconnected()
    assert (links.nats_state, links.etcd_state) == (LinkState.CONNECTING, LinkState.CONNECTING)
    links.directory.ready.set()
    assert links.etcd_state is LinkState.STALE, "it has been read, and is not reached now"


def parts() -> PortParts:
    return PortParts(
        config=FrontendConfig(http=HttpOptions(port=0)),
        metrics=Metrics(),
        readiness=Readiness(),
        capacity=Capacity(),
        descriptors=Descriptors(1000),
        kserve=KserveServer(),
        share_port=False,
    )


STARTING = "the server is starting: it has no connection to NATS yet"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TENSORS = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/live", None, 200, "running"),
        ("GET", "/health?instances=true", None, 503, '"status":"starting","nats":"connecting","etcd":"connecting"'),
        ("GET", "/v2/health/live", None, 200, ""),
        ("GET", "/v2/health/ready", None, 400, ""),
        ("GET", "/v2/models/m/ready", None, 400, '{"error":"Model version not ready"}'),
        ("GET", "/v2", None, 200, "extensions"),
        ("GET", "/metrics", None, 200, "dynamo_runtime_nats_connected"),
        ("GET", "/version", None, 200, "version"),
        ("GET", "/openapi.json", None, 200, "/v1/chat/completions"),
        ("GET", "/console", None, 200, "html"),
        ("GET", "/console/fleet", None, 503, STARTING),
        ("GET", "/v1/models", None, 503, STARTING),
        ("POST", "/v1/chat/completions", CHAT, 503, STARTING),
        ("POST", "/v1/messages", {**CHAT, "max_tokens": 1}, 503, STARTING),
        ("POST", "/v1/responses", {"model": "m", "input": "Hi"}, 503, STARTING),
        ("GET", "/v1/files", None, 503, STARTING),
        ("GET", "/v1/batches", None, 503, STARTING),
        ("GET", "/v1/names", None, 503, STARTING),
        ("GET", "/v1/usage", None, 503, STARTING),
        ("GET", "/busy_threshold", None, 503, STARTING),
        ("POST", "/v2/models/m/infer", TENSORS, 503, '{"error":"' + STARTING),
        ("GET", "/v2/trace/setting", None, 503, STARTING),
        ("POST", "/v2/logging", {"log_info": True}, 503, STARTING),
        ("GET", "/nothing", None, 404, "path '/nothing' is not found"),
        ("GET", "/v1/chat/completions", None, 405, "method GET is not allowed"),
    ],
)
async def test_before_nats_is_reached_what_needs_it_is_refused_and_all_else_is_served(
    method: str, path: str, body: Any, status: int, words: str
) -> None:
    async with (
        open_http(parts(), Guard(None), unconnected()) as side,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{side.server.port}", timeout=120) as client,
    ):
        response = await client.request(method, path, json=body)
        assert (response.status_code, words in response.text) == (status, True), response.text


async def test_what_has_been_reached_is_served_on_the_port_that_is_open() -> None:
    records = FakeRecords()
    with_stores: Any = MagicMock(batches=records, responses=records, usage=None)
    async with (
        open_http(parts(), Guard(None), unconnected()) as side,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{side.server.port}", timeout=120) as client,
    ):
        assert (await client.get("/v1/files")).status_code == 503
        side.attach(with_stores)
        listed = await client.get("/v1/files")
        assert (listed.status_code, listed.json()["data"]) == (200, [])
        assert (await client.get("/v1/responses/resp_1")).status_code == 404
        usage = await client.get("/v1/usage")
        assert (usage.status_code, "there is no usage ledger" in usage.text) == (503, True)


def test_the_options_of_a_frontend_are_those_that_its_parts_take() -> None:
    config = FrontendConfig()
    assert config.serving.retry.max_attempts == 5 and config.serving.retry.burst == 1000
    assert config.router.kv.overlap_score_weight == 4.0 and config.text.limits.max_stop_strings == 32
