"""What the HTTP and the gRPC server of a frontend say of their connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.http.served import ServedRequest
from dynamo.common.http.server import ConnectionObserver, serve_app
from dynamo.common.lifecycle import open_listener
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import GrpcOptions
from dynamo.frontend.port_metrics import connection_metrics
from tests.support.waiting import until


async def no_app(request: ServedRequest) -> None:
    raise AssertionError("no client sends a request")


@asynccontextmanager
async def serving(protocol: str, observer: ConnectionObserver) -> AsyncIterator[int]:
    """Serve a protocol; yield the port."""
    if protocol == "http":
        async with serve_app(open_listener("127.0.0.1", 0, flag="--http-port"), no_app, observer=observer) as http:
            yield http.port
    else:
        async with serve_grpc(GrpcOptions(port=0), [], observer=observer) as grpc:
            yield grpc.port


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_open_connections_are_counted_and_the_ages_of_closed_ones_observed(protocol: str) -> None:
    registry = CollectorRegistry()
    http, grpc = connection_metrics(registry)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"dynamo_frontend_{name}", {"protocol": protocol})

    async with serving(protocol, http if protocol == "http" else grpc) as port:
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
        await until(lambda: value("connections") == 3)
        writers.pop().close()
        await until(lambda: value("connections") == 2)
        assert value("connection_seconds_count") == 1
    await until(lambda: (value("connections"), value("connection_seconds_count")) == (0, 3))
    for writer in writers:
        writer.close()


def test_the_ages_of_open_connections_add_up() -> None:
    registry = CollectorRegistry()
    now = 1000.0
    http, _ = connection_metrics(registry, lambda: now)

    def ages() -> float | None:
        http.show()
        return registry.get_sample_value("dynamo_frontend_open_connection_seconds", {"protocol": "http"})

    http.opened()
    now = 1010.0
    http.opened()
    now = 1015.0
    assert ages() == 15 + 5
    http.closed(age_s=15)
    assert ages() == 5
    http.closed(age_s=5)
    assert ages() == 0
