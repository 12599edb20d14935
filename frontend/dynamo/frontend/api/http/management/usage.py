"""What the keys have used.

GET /v1/usage?from=2026-11-01&to=2026-11-30&key=team-a&model=llama
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import msgspec
from msgspec import Struct

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.frontend.api.declaration import shown
from dynamo.frontend.api.http.errors import PLAIN_ERRORS
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.management.routing import RoutingErrorResponse
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.fleet.peers.usage import UsageStore
from dynamo.frontend.security.ledger import Row
from dynamo.frontend.security.surfaces import Surface

MAX_DAYS = 366
_DEFAULT_DAYS = 30
_FIRST_DAY = date.min + timedelta(days=_DEFAULT_DAYS)


class UsageReport(Struct, frozen=True):
    first_day: str
    last_day: str
    usage: list[Row]


def usage_operations(usage: UsageStore | None) -> list[Operation]:
    async def show_usage(exchange: Exchange) -> None:
        query = exchange.query
        last = _day(query.get("to"), "to") or datetime.now(UTC).date()
        first = _day(query.get("from"), "from") or max(last, _FIRST_DAY) - timedelta(days=_DEFAULT_DAYS)
        if not 0 <= (last - first).days < MAX_DAYS:
            raise InvalidRequest(f"'from' must be at most {MAX_DAYS - 1} days before 'to', got {first} and {last}", param="from")
        if usage is None:
            raise Unavailable("there is no usage ledger: it needs API keys, a connection to NATS, and --usage-ledger")
        rows = await usage.read(first.isoformat(), last.isoformat())
        key, model = query.get("key"), query.get("model")
        rows = [row for row in rows if key in (None, row.key) and model in (None, row.model)]
        await exchange.respond(msgspec.json.encode(UsageReport(first.isoformat(), last.isoformat(), rows)))

    return [
        Operation(
            path="/v1/usage",
            method="GET",
            declared=shown(Surface.USAGE),
            errors=PLAIN_ERRORS,
            handle=show_usage,
            summary="What each key has used of each model, by day",
            group="Usage",
            response=UsageReport,
            error=RoutingErrorResponse,
        )
    ]


def _day(text: str | None, name: str) -> date | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"'{name}' must be a date such as 2026-11-22, got {text[:40]!r}", param=name) from None
