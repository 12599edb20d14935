"""`/console` and what the page reads.

    GET /console           the page; it needs nothing from anywhere else
    GET /console/fleet     models, instances and names now (`fleet.FleetState`)

The page also reads `/metrics` and `/v1/routing/decisions`, and sends requests to models like any other client.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.resources import files

import msgspec

from dynamo.common.config import project_version
from dynamo.frontend.api.console.fleet import FleetState, LoadWatch, model_state, name_state, target_state
from dynamo.frontend.api.declaration import OtherSites, shown
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.fleet.targets import TargetsView
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

_FILES = {
    "/console": ("page.html", b"text/html; charset=utf-8"),
    "/console/console.css": ("console.css", b"text/css; charset=utf-8"),
    "/console/console.js": ("console.js", b"text/javascript; charset=utf-8"),
}
_POLICY = b"default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Console:
    """The state that the console shows."""

    def __init__(
        self,
        plane: DataPlane,
        readiness: Readiness,
        loads: LoadWatch,
        targets: TargetsView,
        namespace: str,
        router_mode: str,
        *,
        explains: bool,
        asks_keys: bool,
        processes: int,
    ) -> None:
        self._plane = plane
        self._readiness = readiness
        self._loads = loads
        self._targets = targets
        self._namespace = namespace
        self._router_mode = router_mode
        self._explains = explains
        self._asks_keys = asks_keys
        self._processes = processes

    def fleet(self, account: Account) -> FleetState:
        plane = self._plane
        reports, rules, now = self._loads.read(), plane.names.rules, time.time()
        return FleetState(
            version=project_version(),
            namespace=self._namespace,
            router_mode=self._router_mode,
            state=self._readiness.state().value,
            explains=self._explains,
            asks_keys=self._asks_keys,
            processes=self._processes,
            models=tuple(model_state(plane, account, card, reports, now) for card in plane.cards(account)),
            names=tuple(name_state(name, rules[name], account) for name in sorted(filter(account.permits, rules))),
            targets=tuple(target_state(each, now) for each in self._targets.targets.targets if account.permits(each.pool.model)),
        )


def console_operations(console: Console) -> list[Operation]:
    async def fleet(exchange: Exchange) -> None:
        await exchange.respond(msgspec.json.encode(console.fleet(exchange.account)), 200, (JSON, (b"cache-control", b"no-store")))

    async def redirect(exchange: Exchange) -> None:
        await exchange.respond(b"", 308, ((b"location", b"/console"),))

    handlers: dict[str, Handler] = {path: _file(*what) for path, what in _FILES.items()}
    handlers |= {"/console/": redirect, "/console/fleet": fleet}
    served = partial(Operation, method="GET", errors=OPENAI_ERRORS)
    linked = dict.fromkeys(("/console", "/console/"), shown(Surface.CONSOLE, other_sites=OtherSites.LINKED))
    read = shown(Surface.CONSOLE)
    return [served(path=path, handle=handle, declared=linked.get(path, read)) for path, handle in handlers.items()]


def _file(name: str, media_type: bytes) -> Handler:
    content = files(__package__).joinpath(name).read_bytes()

    async def page(exchange: Exchange) -> None:
        await exchange.respond(content, 200, ((b"content-type", media_type), *_HEADERS))

    return page
