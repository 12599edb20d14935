"""The guard in front of all HTTP operations: who may use them, and the record of what administrators do."""

from __future__ import annotations

from dynamo.common.errors import DynamoError, Unauthenticated
from dynamo.frontend.api.guard import ADMIN, BROWSED, Guard, record, record_refusal
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Handler
from dynamo.frontend.api.statuses import http_status
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.security.surfaces import Surface

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class HttpGuard:
    """Applies a `Guard` to HTTP requests. Without one, or if it is off, everybody may do everything, and actions are recorded."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard if guard is not None and guard.is_on else None

    async def admits(self, exchange: Exchange, surface: Surface) -> bool:
        """Say whether the caller may use a surface. If not, the refusal has been sent."""
        if self._guard is None or not self._guard.guards(surface):
            exchange.account = ANONYMOUS
            return True
        try:
            self._guard.check_unique(exchange.header_names)
            is_page = surface in BROWSED and exchange.method in _READING
            takes_login = is_page or not _is_of_web_page(exchange)
            exchange.account = self._guard.enter(surface, exchange.headers, takes_login=takes_login)
        except DynamoError as error:
            await self._refuse(error, surface, exchange)
            return False
        return True

    async def _refuse(self, error: DynamoError, surface: Surface, exchange: Exchange) -> None:
        if surface in ADMIN:
            record_refusal(_action(exchange), exchange.peer, exchange.ensure_id(), error)
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if isinstance(error, Unauthenticated):
            headers = ((b"www-authenticate", b'Basic realm="dynamo"' if surface in BROWSED else b"Bearer"),)
        await exchange.refuse(error, http_status(error, exchange.settings.overload), exchange.errors, headers)

    async def run_recorded(self, exchange: Exchange, handle: Handler) -> None:
        """Run an operation that changes something, and record who did so and how it ended."""
        exchange.ensure_id()  # the record and the response name the same one
        try:
            await exchange.run(handle)
        finally:
            outcome = "no response" if exchange.status is None else str(exchange.status)
            record(_action(exchange), exchange.account, exchange.peer, exchange.ensure_id(), outcome)


def _is_of_web_page(exchange: Exchange) -> bool:
    """Return whether a browser made the request, maybe for a page of others: it says so in one of these headers."""
    return any(name in exchange.headers for name in ("origin", "sec-fetch-site"))


def _action(exchange: Exchange) -> str:
    # The path is still encoded, so no line break in it can forge a record.
    return f"{exchange.method} {exchange.raw_path[:200].decode('ascii', 'replace')}"
