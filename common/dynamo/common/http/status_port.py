"""A port that shows the state of a process, without keys: `/live`, `/health`, `/metrics`, and pages of the process's own.

Pages of other sites may have a browser see no more than `/live` and `/health`, and the rest is served only under names of this
machine (`web_pages`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from dynamo.common.http.served import App, ServedRequest
from dynamo.common.http.server import serve_app
from dynamo.common.http.web_pages import OwnHosts, is_link, is_of_other_origin
from dynamo.common.lifecycle import open_listener

log = logging.getLogger(__name__)

JSON = b"application/json"
_OPEN_PAGES = ("/live", "/health")

Scrape: TypeAlias = Callable[[], Awaitable[tuple[bytes, str]]]
"""Returns the text of a metrics scrape and its content type."""
PageContent: TypeAlias = tuple[int, bytes, bytes]
"""The status, the body and its type."""
Page: TypeAlias = Callable[[], Awaitable[PageContent]]
Order: TypeAlias = Callable[[ServedRequest], Awaitable[PageContent]]
"""Changes something, and is sent by POST."""


def status_pages(
    health: Page,
    scrape: Scrape,
    pages: Mapping[str, Page],
    hosts: OwnHosts,
    orders: Mapping[str, Order] = MappingProxyType({}),
) -> App:
    """Return the app with `/health`, `/live`, `/metrics`, and further pages and orders by path."""

    async def live() -> PageContent:
        return 200, b'{"status":"live"}', JSON

    async def metrics() -> PageContent:
        text, kind = await scrape()
        return 200, text, kind.encode()

    all_pages: Mapping[str, Page] = {"/health": health, "/live": live, "/metrics": metrics, **pages}
    *most, last = [*all_pages, *orders]
    absent = msgspec.json.encode({"error": f"there are {', '.join(most)} and {last}"})

    async def app(request: ServedRequest) -> None:
        page, order = all_pages.get(request.path), orders.get(request.path)
        if request.path not in _OPEN_PAGES and (reason := _refusal(request, hosts)) is not None:
            code, body, kind = 403, msgspec.json.encode({"error": reason}), JSON
        elif order is not None and request.method == "POST":
            code, body, kind = await order(request)
        elif order is not None:
            code, body, kind = 405, b'{"error":"only POST is allowed"}', JSON
        elif page is None:
            code, body, kind = 404, absent, JSON
        elif request.method not in ("GET", "HEAD"):
            code, body, kind = 405, b'{"error":"only GET is allowed"}', JSON
        else:
            code, body, kind = await page()
        request.begin(code, ((b"content-type", kind), (b"content-length", b"%d" % len(body))))
        await request.write(body, is_last=True)

    return app


def _refusal(request: ServedRequest, hosts: OwnHosts) -> str | None:
    """Return why a browser is refused what the page that it shows wants."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
    if is_of_other_origin(headers, request.scheme) and not is_link(request.method, headers):
        return "pages of other sites may not use this port"
    host = headers.get("host", "")
    return None if hosts.include(host) else f"this port is used by its own names, and {host[:200]!r} is not among --allowed-host"


@asynccontextmanager
async def serve_status_port(
    host: str, port: int | None, allowed_hosts: Collection[str], app_of: Callable[[OwnHosts], App]
) -> AsyncIterator[int | None]:
    """Serve a status port while the body runs and yield its number; None without a port. `app_of` makes the app.

    Raises ConfigError if the port cannot be opened.
    """
    if port is None:
        yield None
        return
    listener = open_listener(host, port, flag="--status-port")
    async with serve_app(listener, app_of(OwnHosts(allowed_hosts, host))) as server:
        log.info("status on %s:%d", host, server.port)
        yield server.port
