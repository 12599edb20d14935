"""The operations that are always there: health, metrics, the list of models. Protocols add their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from math import isinf

import orjson

from dynamo.common.config import project_version
from dynamo.common.discovery import Instance, other_names
from dynamo.common.errors import Forbidden, ModelNotFound
from dynamo.common.etcd import Etcd
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.model_card import ModelCard
from dynamo.common.process.interpreter import interpreter
from dynamo.common.protocol import PROTOCOL
from dynamo.frontend.api.declaration import HEALTH, OtherSites, shown
from dynamo.frontend.api.health import Readiness, State
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

Scrape = Callable[[], Awaitable[tuple[bytes, str]]]
"""Returns the text of a metrics scrape and its content type."""


_AT_ONCE = 200
"""Names that are described before the event loop may do something else: each adapter of a model is one."""
_ANTHROPIC = "anthropic-version"
"""A header of Anthropic's clients, which they have to send."""
_TRUE = frozenset({"1", "true", "yes"})


class LinkState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    STALE = "stale"
    """Not reached now; the last view is used."""


@dataclass(frozen=True, slots=True)
class Links:
    """The connections to the systems behind the process. They are objects before they are connected."""

    etcd: Etcd
    directory: Directory
    nats: Connection
    """For requests, and for the few other messages that must arrive."""
    events_nats: Connection
    events: EventBus

    @property
    def nats_state(self) -> LinkState:
        if self.nats.is_connected:
            return LinkState.CONNECTED
        return LinkState.CONNECTING if isinf(self.nats.opened_at) else LinkState.DISCONNECTED

    @property
    def etcd_state(self) -> LinkState:
        if not self.directory.ready.is_set():
            return LinkState.CONNECTING
        return LinkState.STALE if self.directory.stale else LinkState.CONNECTED


def health_operations(readiness: Readiness, links: Links) -> list[Operation]:
    """`/live` says that the process runs, `/health` whether it can serve; `/health?instances=true` lists what it follows."""

    async def live(exchange: Exchange) -> None:
        await _respond(exchange, {"status": "live", "message": "the server is running"})

    async def health(exchange: Exchange) -> None:
        state = readiness.state()
        body: dict[str, object] = {
            "status": state.value,
            "nats": links.nats_state.value,
            "etcd": links.etcd_state.value,
            "python": interpreter(),
        }
        if exchange.query.get("instances", "").lower() in _TRUE:
            body |= _listing(readiness.registered())
        details = []
        if links.etcd_state is LinkState.STALE:
            details.append("etcd cannot be reached; the instances are those of the last view")
        if links.events.is_dropped:
            details.append("events come faster than they can be handled; requests are routed by load, without KV caches")
        if others := links.directory.other_protocols():
            versions = ", ".join(map(str, sorted(set(others))))
            details.append(
                f"{len(others)} registrations are left out: their workers speak version {versions} of the protocol, and this "
                f"frontend version {PROTOCOL}; at most one apart"
            )
        if details:
            body["detail"] = ". ".join(details)
        await _respond(exchange, body, 200 if state is State.READY else 503)

    async def ping(exchange: Exchange) -> None:
        await exchange.respond(b"", 200 if readiness.is_ready() else 503, ())

    served = partial(Operation, declared=HEALTH, errors=OPENAI_ERRORS)
    page = partial(served, method="GET", group="Server")
    return [
        *(served(method=method, path="/ping", handle=ping) for method in ("GET", "POST")),
        page(path="/live", handle=live, summary="Whether this process runs"),
        page(path="/health", handle=health, summary="Whether this server can serve; `?instances=true` lists the instances"),
    ]


def _listing(instances: Collection[Instance]) -> dict[str, object]:
    return {
        "endpoints": sorted({f"dyn://{instance.endpoint}" for instance in instances}),
        "instances": [
            {
                "instance_id": f"{instance.id:x}",
                "namespace": instance.endpoint.namespace,
                "component": instance.endpoint.component,
                "endpoint": instance.endpoint.name,
                "model": instance.card.name,
                "transport": {"nats": instance.subject},
            }
            for instance in sorted(instances, key=lambda instance: instance.id)
        ],
    }


def process_operations() -> list[Operation]:
    """`/version` and `/load`, in the form of `vllm serve`."""

    async def version(exchange: Exchange) -> None:
        await _respond(exchange, {"version": project_version()})

    async def load(exchange: Exchange) -> None:
        await _respond(exchange, {"server_load": exchange.settings.capacity.requests - 1})  # without this one

    return [
        _page("/version", Surface.METADATA, version, "The version of this server"),
        _page("/load", Surface.METADATA, load, "The number of requests in this process"),
    ]


def metrics_operations(scrape: Scrape) -> list[Operation]:
    async def metrics(exchange: Exchange) -> None:
        text, content_type = await scrape()
        await exchange.respond(text, 200, ((b"content-type", content_type.encode()),))

    page = _page("/metrics", Surface.METRICS, metrics, "Prometheus metrics")
    return [replace(page, declared=shown(Surface.METRICS, other_sites=OtherSites.LINKED))]


def model_operations(plane: DataPlane, readiness: Readiness, started_at: float) -> list[Operation]:
    """Return the operations below `/v1/models`, in OpenAI's form with whether each model can be used now.

    Anthropic's clients, which send a header of their own, get the list and the models in Anthropic's form.
    """

    def describe(account: Account, card: ModelCard, name: str, root: str) -> dict[str, object]:
        rule = plane.names.rules.get(name)
        described: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": int(started_at),
            "owned_by": card.platform,
            "kind": card.kind.value,
            "ready": readiness.is_model_ready(name),
            "root": root,
            "parent": card.name if name != card.name else None,
        }
        if card.llm is not None:
            described["max_model_len"] = card.llm.context_length
        if rule is not None:
            usable = [target for target in rule.targets if account.permits(target.model)]
            described["targets"] = [{"model": target.model, "weight": target.weight} for target in usable]
        return described

    def named(account: Account) -> list[tuple[ModelCard, str]]:
        """Return the names that the caller may use, each with the card that describes it."""
        cards = {name: card for card in plane.cards(account) for name in (card.name, *other_names(card))}
        for name in plane.names.rules:
            cards.pop(name, None)
            with suppress(ModelNotFound, Forbidden):
                cards[name] = plane.described(account, name)
        return [(card, name) for name, card in cards.items() if account.permits(name)]

    created_at = datetime.fromtimestamp(int(started_at), UTC).isoformat().replace("+00:00", "Z")

    def anthropic_model(name: str) -> dict[str, object]:
        return {"type": "model", "id": name, "display_name": name, "created_at": created_at}

    def anthropic_list(names: list[str]) -> dict[str, object]:
        first, last = (names[0], names[-1]) if names else (None, None)
        return {"data": [anthropic_model(name) for name in names], "has_more": False, "first_id": first, "last_id": last}

    async def models(exchange: Exchange) -> None:
        models = named(exchange.account)
        if _ANTHROPIC in exchange.headers:
            return await _respond(exchange, anthropic_list([name for _, name in models]))
        roots = {card.name: _roots(card) for card, _ in models}
        data: list[dict[str, object]] = []
        for card, name in models:
            data.append(describe(exchange.account, card, name, roots[card.name].get(name, card.name)))
            if len(data) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        await _respond(exchange, {"object": "list", "data": data})

    async def model(exchange: Exchange) -> None:
        name = exchange.parameters["model"]
        card = plane.described(exchange.account, name)
        if _ANTHROPIC in exchange.headers:
            return await _respond(exchange, anthropic_model(name))
        await _respond(exchange, describe(exchange.account, card, name, _roots(card).get(name, card.name)))

    async def ready(exchange: Exchange) -> None:
        name = exchange.parameters["model"]
        plane.described(exchange.account, name)
        is_ready = readiness.is_model_ready(name)
        await _respond(exchange, {"id": name, "ready": is_ready}, 200 if is_ready else 503)

    return [
        _page("/v1/models", Surface.METADATA, models, "The models that are served", "Models"),
        _page("/v1/models/{model:path}/ready", Surface.METADATA, ready, "Whether a model can be used now", "Models"),
        _page("/v1/models/{model:path}", Surface.METADATA, model, "One model", "Models"),
    ]


def _roots(card: ModelCard) -> dict[str, str]:
    """Return where the adapters of a model were read from, where that is known. Other names stand for the model itself."""
    reports = () if card.llm is None else card.llm.adapter_reports
    return {report.name: report.path for report in reports if report.path}


def _page(path: str, surface: Surface, handle: Handler, summary: str, group: str = "Server") -> Operation:
    return Operation(
        method="GET", path=path, declared=shown(surface), errors=OPENAI_ERRORS, handle=handle, summary=summary, group=group
    )


async def _respond(exchange: Exchange, body: object, status: int = 200) -> None:
    await exchange.respond(orjson.dumps(body), status)
