"""`/console` and what the page reads.

    GET /console           the page; it needs nothing from anywhere else
    GET /console/fleet     models and instances now (`fleet.FleetState`)

Besides these the page reads `/metrics` and `/v1/routing/decisions`, and asks models through the same doors as everybody.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dynamo.common.config import project_version
from dynamo.frontend.api.console.fleet import FleetState, LoadWatch, model_state
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import account_of
from dynamo.frontend.security.accounts import Account

_FILES = {
    "/console": ("page.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Console:
    """What the routes work on."""

    def __init__(
        self,
        readiness: Readiness,
        loads: LoadWatch,
        namespace: str,
        router_mode: str,
        *,
        explains: bool,
        asks_keys: bool,
        processes: int,
    ) -> None:
        self._readiness = readiness
        self._loads = loads
        self._namespace = namespace
        self._router_mode = router_mode
        self._explains = explains
        self._asks_keys = asks_keys
        self._processes = processes

    def fleet(self, account: Account) -> FleetState:
        """Raises Unavailable while the process starts."""
        plane = self._readiness.plane
        reports = self._loads.read()
        return FleetState(
            version=project_version(),
            namespace=self._namespace,
            router_mode=self._router_mode,
            state=self._readiness.state().value,
            explains=self._explains,
            asks_keys=self._asks_keys,
            processes=self._processes,
            models=tuple(model_state(plane, card, reports, time.time()) for card in plane.cards(account)),
        )


def console_routes(console: Console) -> list[BaseRoute]:
    async def fleet(request: Request) -> Response:
        return Response(
            msgspec.json.encode(console.fleet(account_of(request.scope))),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    async def slash(request: Request) -> Response:
        return RedirectResponse("/console", status_code=308)

    pages: list[BaseRoute] = [Route(path, _file(*what)) for path, what in _FILES.items()]
    return [*pages, Route("/console/", slash), Route("/console/fleet", fleet)]


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__package__).joinpath(name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return page
