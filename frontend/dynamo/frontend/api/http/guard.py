"""The guard in front of all HTTP operations: who may use them, and the record of what administrators do.

Nothing of a body is read before a request has passed it.

1. A request that a browser makes for a page of another site is refused, unless the operation or `--allowed-origins` permits it.
2. The key must permit the operation, where there are keys, and have something left of its limits for a request to a model.
3. What callers without a key are served, they are served only under names of this server (`--allowed-host`); and what
   administrators do, not to pages of any site (`--allowed-origins '*'`).
"""

from __future__ import annotations

from dynamo.common.errors import DynamoError, Forbidden, RateLimited, Unauthenticated
from dynamo.common.http.web_pages import OwnHosts, is_link, is_of_other_origin
from dynamo.frontend.api.declaration import Charge, OtherSites
from dynamo.frontend.api.guard import ADMIN, BROWSED, Guard, record, record_refusal
from dynamo.frontend.api.http.cors import Cors
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Handler
from dynamo.frontend.api.statuses import http_status
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.security.accounts import ANONYMOUS, Account, AnonymousAccount
from dynamo.frontend.security.surfaces import Surface

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class HttpGuard:
    """Applies a `Guard` to HTTP requests. Without one, or if it is off, no key is needed, and actions are recorded."""

    def __init__(self, guard: Guard | None = None, options: HttpOptions | None = None) -> None:
        options = options or HttpOptions()
        self._guard = guard if guard is not None and guard.is_on else None
        self._hosts = OwnHosts(options.allowed_hosts, options.host)
        self.cors = Cors(options)

    async def admits(self, exchange: Exchange) -> bool:
        """Say whether the caller may use the operation that the request is for. If not, the refusal has been sent."""
        declared, surface = exchange.declared, exchange.declared.surface
        try:
            is_foreign = is_of_other_origin(exchange.headers, exchange.scheme)
            if is_foreign:
                self._check_page(exchange, declared.other_sites)
            account = ANONYMOUS if self._guard is None else self._enter(self._guard, exchange)
            if isinstance(account, AnonymousAccount) and surface is not Surface.HEALTH:
                if not self._hosts.include(exchange.headers.get("host", "")):
                    raise _foreign_host(exchange)
                if is_foreign and surface in ADMIN and not self.cors.names(exchange.headers):
                    raise Forbidden("without a key this takes an origin that --allowed-origins names; '*' is not enough")
        except DynamoError as error:
            await self._refuse(error, surface, exchange)
            return False
        exchange.admit(account)
        if declared.charge is Charge.REQUESTS and account is not ANONYMOUS:
            try:
                account.check_limits()
            except RateLimited as error:
                await exchange.fail(error)
                return False
        return True

    def _check_page(self, exchange: Exchange, other_sites: OtherSites) -> None:
        """Raises Forbidden for a page that must not make this request."""
        headers, method = exchange.headers, exchange.method
        if other_sites is OtherSites.SERVED or self.cors.permits(method, headers):
            return
        if other_sites is not OtherSites.LINKED or not is_link(method, headers):
            page = f"'{headers['origin'][:200]}'" if "origin" in headers else "another site"
            raise Forbidden(f"pages of {page} may not use this server: see --allowed-origins")

    @staticmethod
    def _enter(guard: Guard, exchange: Exchange) -> Account:
        """Return the account of the caller. Raises DynamoError for one that may not use the operation."""
        declared, surface = exchange.declared, exchange.declared.surface
        if not guard.guards(surface):
            return ANONYMOUS
        guard.check_unique(exchange.header_names)
        is_page = surface in BROWSED and exchange.method in _READING
        return guard.enter(declared, exchange.headers, takes_login=is_page or not _is_of_web_page(exchange))

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


def _foreign_host(exchange: Exchange) -> Forbidden:
    """Return the refusal of a request by a name that is not this server's."""
    host = exchange.headers["host"]
    return Forbidden(f"without API keys this server is used by its own names, and {host[:200]!r} is not among --allowed-host")


def _is_of_web_page(exchange: Exchange) -> bool:
    """Return whether a browser made the request, maybe for a page of others: it says so in one of these headers."""
    return any(name in exchange.headers for name in ("origin", "sec-fetch-site"))


def _action(exchange: Exchange) -> str:
    # The path is still encoded, so no line break in it can forge a record.
    return f"{exchange.method} {exchange.raw_path[:200].decode('ascii', 'replace')}"
