"""The names that operators give to models: read and changed for all frontends of the namespace.

GET    /v1/names             all names, with what they stand for
GET    /v1/names/{name}      one of them
PUT    /v1/names/{name}      {"targets": [{"model", "weight"}], "fallbacks": [{"model", "on"}], "shadows": […], "sticky"}
DELETE /v1/names/{name}
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dynamo.common.errors import NotFound
from dynamo.frontend.api.declaration import Reads, changed, shown
from dynamo.frontend.api.http.errors import PLAIN_ERRORS
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.management.routing import RoutingErrorResponse
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.names.rules import Fallback, Rule, Shadow, Sticky, Target, models_of
from dynamo.frontend.names.table import NameTable
from dynamo.frontend.security.surfaces import Surface

_DECLARED = {
    "GET": shown(Surface.NAMES),
    "PUT": changed(Surface.NAMES, reads=Reads.JSON, copies=3, deadline_s=60.0),
    "DELETE": changed(Surface.NAMES, reads=Reads.LITTLE, copies=1, deadline_s=60.0),
}


class NamedRule(Struct, frozen=True, kw_only=True):
    """A name, and what it stands for."""

    name: str
    targets: tuple[Target, ...]
    fallbacks: tuple[Fallback, ...]
    shadows: tuple[Shadow, ...]
    sticky: Sticky | None


class AllNames(Struct, frozen=True):
    names: list[NamedRule]


class Removed(Struct, frozen=True):
    name: str
    deleted: bool = True


def name_operations(names: NameTable) -> list[Operation]:
    """A key sees and changes only names, and sets only models, that it may use."""
    decoder = msgspec.json.Decoder(Rule)

    async def list_names(exchange: Exchange) -> None:
        rules = names.rules
        shown = [_shown(name, rules[name]) for name in sorted(filter(exchange.account.permits, rules))]
        await exchange.respond(msgspec.json.encode(AllNames(shown)))

    async def show_name(exchange: Exchange) -> None:
        name = _permitted(exchange)
        rule = names.rules.get(name)
        if rule is None:
            raise _not_found(name)
        await exchange.respond(msgspec.json.encode(_shown(name, rule)))

    async def set_name(exchange: Exchange) -> None:
        exchange.call()
        name = _permitted(exchange)
        rule = await read_json(exchange, decoder)
        for model in models_of(rule):
            exchange.account.permit(model)

        def put(rules: dict[str, Rule]) -> None:
            rules[name] = rule

        await names.change(put)
        await exchange.respond(msgspec.json.encode(_shown(name, rule)))

    async def remove_name(exchange: Exchange) -> None:
        exchange.call()
        name = _permitted(exchange)

        def remove(rules: dict[str, Rule]) -> None:
            if rules.pop(name, None) is None:
                raise _not_found(name)

        await names.change(remove)
        await exchange.respond(msgspec.json.encode(Removed(name)))

    def operation(path: str, method: str, handle: Handler, summary: str, response: type) -> Operation:
        return Operation(
            path=path,
            method=method,
            declared=_DECLARED[method],
            errors=PLAIN_ERRORS,
            handle=handle,
            summary=summary,
            group="Names",
            request=Rule if method == "PUT" else None,
            response=response,
            error=RoutingErrorResponse,
        )

    return [
        operation("/v1/names", "GET", list_names, "The names of operators, and what they stand for", AllNames),
        operation("/v1/names/{name:path}", "GET", show_name, "What a name stands for", NamedRule),
        operation("/v1/names/{name:path}", "PUT", set_name, "Set what a name stands for", NamedRule),
        operation("/v1/names/{name:path}", "DELETE", remove_name, "Remove a name", Removed),
    ]


def _permitted(exchange: Exchange) -> str:
    """Return the name in the path. Raises Forbidden."""
    name = exchange.parameters["name"]
    exchange.account.permit(name)
    return name


def _not_found(name: str) -> NotFound:
    return NotFound(f"there is no name '{name[:200]}'")


def _shown(name: str, rule: Rule) -> NamedRule:
    return NamedRule(name=name, targets=rule.targets, fallbacks=rule.fallbacks, shadows=rule.shadows, sticky=rule.sticky)
