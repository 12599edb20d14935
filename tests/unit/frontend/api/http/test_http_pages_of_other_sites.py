"""What pages of other sites, and names that are not the server's, reach: tried on every operation that there is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from dynamo.frontend.api.declaration import OtherSites
from dynamo.frontend.api.guard import ADMIN, Accounts, Guard, watch_keys
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Scope, Surface
from tests.support.http_edge import open_http_edge, raw_connection
from tests.unit.frontend.api.http.test_http_authorization import OPERATIONS, Edge, canonical

EVERY = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}")
HOST = ("host", "127.0.0.1:8000")
FOREIGN = [
    (("origin", "http://evil.example"),),
    (("origin", "null"),),
    (("origin", "http://127.0.0.1:3000"),),
    (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")),
    (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")),
    (("sec-fetch-site", "same-site"),),
    (("origin", "http://evil.example"), ("sec-fetch-site", "cross-site"), ("content-type", "text/plain")),
]
LINKED = {"/console", "/console/", "/docs", "/openapi.json", "/metrics"}
LINK = (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))


@cache
def edge_with(**options: Any) -> Edge:
    """Return a server that needs no key. It keeps nothing of a request, and making one takes longer than many requests."""
    return Edge(Guard(None), HttpOptions(**options))


@dataclass(frozen=True, slots=True)
class Keyed:
    """Servers for the holder of a key, who may do everything."""

    edge: Edge
    open_edge: Edge
    """Where everything is open to others, too."""
    credentials: tuple[str, str]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(entry_for(key := make_key(), "admin", scopes=[Scope.ADMIN]))
    accounts = Accounts(watch_keys(file))
    return Keyed(Edge(Guard(accounts)), Edge(Guard(accounts, open_surfaces=set(Surface))), ("x-api-key", key))


async def reaches(edge: Edge, operation: Operation, *headers: tuple[str, str]) -> bool:
    """Whether the handler ran; else the request was refused with 403."""
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    status, ran = await edge.request(operation.method, canonical(operation), encoded)
    assert (status, len(ran)) in ((200, 1), (403, 0)), (operation.path, status)
    return bool(ran)


@EVERY
async def test_pages_of_other_sites_reach_health_alone(operation: Operation, keyed: Keyed) -> None:
    is_health = operation.declared.surface is Surface.HEALTH
    for edge, credentials in ((edge_with(), ()), (keyed.edge, (keyed.credentials,))):
        assert await reaches(edge, operation, HOST, *credentials)
        for page in FOREIGN:
            assert await reaches(edge, operation, HOST, *credentials, *page) == is_health
        assert await reaches(edge, operation, HOST, *credentials, *LINK) == (is_health or operation.path in LINKED)


@EVERY
async def test_own_pages_and_programs_reach_everything(operation: Operation) -> None:
    edge = edge_with()
    for own in (
        (),
        (("origin", "http://127.0.0.1:8000"),),
        (("sec-fetch-site", "same-origin"), ("origin", "https://behind.a.proxy")),
        (("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")),
        (("sec-fetch-mode", "cors"),),
    ):
        assert await reaches(edge, operation, HOST, *own)


@EVERY
async def test_pages_of_allowed_origins_reach_what_callers_reach(operation: Operation) -> None:
    page = (("origin", "https://app.example"), ("sec-fetch-site", "cross-site"))
    stranger = (("origin", "https://evil.example"), ("sec-fetch-site", "cross-site"))
    is_health, is_of_admins = operation.declared.surface is Surface.HEALTH, operation.declared.surface in ADMIN
    named = edge_with(allowed_origins=("https://app.example",))
    assert await reaches(named, operation, HOST, *page)
    assert await reaches(named, operation, HOST, *stranger) == is_health
    assert await reaches(named, operation, HOST, ("sec-fetch-site", "cross-site")) == is_health, "of which origin, is unknown"
    every = edge_with(allowed_origins=("*",))
    assert await reaches(every, operation, HOST, *stranger) != is_of_admins
    both = edge_with(allowed_origins=("*", "https://app.example"))
    assert await reaches(both, operation, HOST, *page)
    readers = edge_with(allowed_origins=("https://app.example",), allowed_methods=("GET",))
    assert await reaches(readers, operation, HOST, *page) == (is_health or operation.method == "GET")


@EVERY
async def test_without_a_key_other_names_than_the_servers_reach_health_alone(operation: Operation, keyed: Keyed) -> None:
    is_health = operation.declared.surface is Surface.HEALTH
    for rebound in ((), (("origin", "http://evil.example"), ("sec-fetch-site", "same-origin"))):
        other = (("host", "evil.example"), *rebound)
        assert await reaches(edge_with(), operation, *other) == is_health
        assert await reaches(edge_with(allowed_hosts=("evil.example",)), operation, *other)
        assert await reaches(keyed.open_edge, operation, *other) == is_health
        assert await reaches(keyed.edge, operation, *other, keyed.credentials), "a page has no key"


@EVERY
def test_what_changes_something_is_never_done_by_a_link(operation: Operation) -> None:
    assert operation.declared.other_sites is OtherSites.REFUSED or not operation.declared.is_action
    assert operation.declared.other_sites is not OtherSites.LINKED or operation.method == "GET"
    assert not (operation.declared.is_action and operation.method == "GET"), "links and images would do it"


async def test_paths_and_methods_that_do_not_exist_are_refused_as_well() -> None:
    edge = edge_with()
    for method, path in (("POST", "/nowhere"), ("DELETE", "/v1/models"), ("OPTIONS", "/v1/models")):
        for header in ((b"origin", b"http://evil.example"), (b"host", b"evil.example")):
            assert (await edge.request(method, path, [header]))[0] == 403


@pytest.mark.parametrize("header", ["origin: http://evil.example", "sec-fetch-site: cross-site"])
async def test_a_refusal_comes_before_the_body_and_says_what_would_allow_it(header: str) -> None:
    def refused(port: int, host: str) -> bytes:
        with raw_connection(port) as connection:
            head = f"POST /v2/models/any/infer HTTP/1.1\r\nhost: {host}\r\n{header}\r\ncontent-type: text/plain\r\n"
            connection.sendall(f"{head}content-length: 1000000\r\n\r\n".encode())  # none of which is ever sent
            return connection.recv(65536)

    async with open_http_edge() as edge:
        response = await asyncio.to_thread(refused, edge.port, f"127.0.0.1:{edge.port}")
        assert response.startswith(b"HTTP/1.1 403 ") and b"--allowed-origins" in response
        header = "x-nothing: special"
        response = await asyncio.to_thread(refused, edge.port, "evil.example")
        assert response.startswith(b"HTTP/1.1 403 ") and b"--allowed-host" in response
