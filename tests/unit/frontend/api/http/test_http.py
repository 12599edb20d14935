from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

import httpx2
import pytest

from dynamo.common.errors import Overloaded
from dynamo.common.observability.telemetry import make_registry, render
from dynamo.common.process.interpreter import interpreter
from dynamo.frontend.api.declaration import shown
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.management.server import LinkState, health_operations, metrics_operations, model_operations
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.config import HttpOptions, OverloadStatus, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeTexts, instance, tensor_card
from tests.support.http_edge import chat_card, connected, open_http_edge
from tests.support.waiting import WAIT_S


@dataclass
class Side:
    readiness: Readiness
    directory: FakeDirectory
    links: Any
    client: httpx2.AsyncClient
    plane: DataPlane


async def overloaded(exchange: Exchange) -> None:
    raise Overloaded("too much", retry_after_s=2.0)


async def broken(exchange: Exchange) -> None:
    raise RuntimeError("secret")


def page(path: str, handle: Handler) -> Operation:
    return Operation(method="GET", path=path, declared=shown(Surface.METADATA), errors=OPENAI_ERRORS, handle=handle)


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    directory, links, readiness = FakeDirectory(instance(0xA, tensor_card("org/adder"))), connected(), Readiness()
    registry = make_registry()
    metrics = FrontendMetrics(registry)

    async def scrape() -> tuple[bytes, str]:
        return render(registry)

    operations = [
        *health_operations(readiness, links),
        *metrics_operations(scrape),
        page("/overloaded", overloaded),
        page("/broken", broken),
    ]
    app = HttpApp(operations, HttpSettings(overload=OverloadStatus.TOO_MANY_REQUESTS))
    settings = ServingOptions(models=(tensor_card("later"),))
    async with (
        open_data_plane(directory, FakeClient(), FakeLink(), RoundRobin(), FakeTexts(), metrics, settings) as plane,
        serve_http(HttpOptions(port=0), app) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        app.attach([*operations, *model_operations(plane, readiness, 1000.5)])
        yield Side(readiness, directory, links, client, plane)


async def test_live_says_that_the_process_runs_whatever_else(side: Side) -> None:
    side.readiness.start_draining()
    response = await side.client.get("/live")
    assert (response.status_code, response.json()["status"]) == (200, "live")


async def test_health_tells_the_whole_life_of_a_process(side: Side) -> None:
    async def health() -> tuple[int, str]:
        response = await side.client.get("/health")
        return response.status_code, response.json()["status"]

    assert await health() == (503, "starting")
    side.readiness.attach(side.plane)
    assert await health() == (200, "healthy")
    side.directory.remove(0xA)
    await asyncio.sleep(0)
    assert await health() == (503, "unhealthy")
    side.readiness.start_draining()
    assert await health() == (503, "shutting_down")


async def test_health_lists_instances_on_request_and_tells_of_a_stale_view(side: Side) -> None:
    side.readiness.attach(side.plane)
    side.links.etcd_state = LinkState.STALE
    short = (await side.client.get("/health")).json()
    assert short.keys() == {"status", "nats", "etcd", "python", "detail"}, "a probe of a large fleet is cheap"
    body = (await side.client.get("/health?instances=true")).json()
    assert body["status"] == "healthy"
    assert body["endpoints"] == ["dyn://dynamo.backend.generate"]
    (only,) = body["instances"]
    assert (only["instance_id"], only["model"]) == ("a", "org/adder")
    assert (body["nats"], body["etcd"]) == ("connected", "stale")
    assert body["python"] == interpreter()
    assert "last view" in body["detail"]


async def test_health_says_that_events_are_not_followed_and_stays_healthy(side: Side) -> None:
    side.readiness.attach(side.plane)
    side.links.events.is_dropped = True
    response = await side.client.get("/health")
    assert response.status_code == 200
    assert "requests are routed by load" in response.json()["detail"]


async def test_health_says_which_versions_of_the_protocol_are_left_out_and_stays_healthy(side: Side) -> None:
    side.readiness.attach(side.plane)
    side.links.directory.other_protocols = lambda: [7, 7, 9]
    response = await side.client.get("/health")
    assert response.status_code == 200
    assert response.json()["detail"].startswith("3 registrations are left out: their workers speak version 7, 9 of the protocol")


async def test_models_are_listed_with_slashes_in_their_names(side: Side) -> None:
    side.readiness.attach(side.plane)
    listed = (await side.client.get("/v1/models")).json()
    assert [(model["id"], model["ready"]) for model in listed["data"]] == [("later", False), ("org/adder", True)]
    one = await side.client.get("/v1/models/org/adder")
    assert one.json() == listed["data"][1]
    assert (await side.client.get("/v1/models/org/adder/ready")).status_code == 200
    assert (await side.client.get("/v1/models/later/ready")).status_code == 503


async def test_the_loop_goes_on_while_thousands_of_adapters_are_listed() -> None:
    card = chat_card(adapters=tuple(f"adapter-{number}" for number in range(2000)))
    loop = asyncio.get_running_loop()
    described = longest = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal described
        described += event == "call" and frame.f_code is Readiness.is_model_ready.__code__

    def tick() -> None:
        nonlocal described, longest
        longest, described = max(longest, described), 0
        loop.call_soon(tick)

    async with open_http_edge(card) as edge:
        sys.setprofile(count)
        loop.call_soon(tick)
        try:
            listed = (await edge.http.get("/v1/models")).json()["data"]
        finally:
            sys.setprofile(None)
    assert len(listed) == 2001
    assert 0 < longest <= 200


async def test_anthropics_clients_get_models_in_their_form(side: Side) -> None:
    side.readiness.attach(side.plane)
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await side.client.get("/v1/models", headers=headers)).json()
    assert [(model["type"], model["id"], model["display_name"]) for model in listed["data"]] == [
        ("model", "later", "later"),
        ("model", "org/adder", "org/adder"),
    ]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "later", "org/adder")
    assert datetime.fromisoformat(listed["data"][0]["created_at"]).tzinfo is not None
    assert (await side.client.get("/v1/models/org/adder", headers=headers)).json() == listed["data"][1]


async def test_errors_are_json(side: Side) -> None:
    side.readiness.attach(side.plane)
    missing = await side.client.get("/v1/models/missing")
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert (error["message"], error["type"]) == ("model 'missing' is not found", "not_found_error")
    assert (await side.client.get("/nothing")).json()["error"]["message"] == "path '/nothing' is not found"
    refused = await side.client.post("/live")
    assert (refused.status_code, refused.json()["error"]["message"]) == (405, "method POST is not allowed for '/live'")


async def test_overload_says_when_to_retry(side: Side) -> None:
    response = await side.client.get("/overloaded")
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_an_unforeseen_error_says_nothing_of_the_inside(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    response = await side.client.get("/broken", headers={"x-request-id": "r9"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    assert "secret" not in response.text
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "GET /broken failed unforeseen, request r9"
    ]


async def test_metrics_are_prometheus_text(side: Side) -> None:
    response = await side.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "dynamo_frontend_requests_total" in response.text


async def test_the_server_leaves_signals_to_the_process(side: Side) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_stopping_lets_a_running_request_finish() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        entered.set()
        await leave.wait()
        await exchange.respond(b'{"done": true}')

    async with (
        serve_http(HttpOptions(port=0), HttpApp([page("/slow", slow)])) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        asking = asyncio.create_task(client.get("/slow"))
        await entered.wait()
        stopping = asyncio.create_task(server.stop(10.0))
        await asyncio.sleep(0)
        leave.set()
        assert (await asking).json() == {"done": True}
        await stopping
        with pytest.raises(httpx2.TransportError):
            await client.get("/slow")


async def test_a_stream_that_a_stop_cuts_off_ends_with_an_error_and_a_client_that_does_not_read_holds_nothing_up() -> None:
    async def endless(exchange: Exchange) -> None:
        async with exchange.events() as stream:
            await stream.write(b"data: 1\n\n")
            await asyncio.Event().wait()

    async def unread(exchange: Exchange) -> None:
        async with exchange.events() as stream:
            while True:
                await stream.write(b"data: %b\n\n" % bytes(1 << 20))

    async with (
        asyncio.timeout(WAIT_S),
        serve_http(HttpOptions(port=0), HttpApp([page("/endless", endless), page("/unread", unread)])) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
        client.stream("GET", "/unread") as _,
        client.stream("GET", "/endless") as response,
    ):
        pieces = response.aiter_text()
        assert await anext(pieces) == "data: 1\n\n"
        await server.stop(0.0)
        rest = "".join([piece async for piece in pieces])
    assert rest.startswith("event: error\ndata: ") and "the server stops" in rest
