"""Authentication and authorization by keys, scopes and restrictions, and the audit log. The same for all protocols.

1. A surface that is restricted in Triton's form is served only to requests with the header that the restriction names.
2. Without a key file that is all. With one, every surface but health needs a key with its scope, unless it is left open.
3. A key that a request shows is checked even where none is needed: an invalid key is an error, not an anonymous caller.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from dynamo.common.errors import DynamoError, Forbidden, InvalidRequest, Unauthenticated
from dynamo.common.logs import AUDIT
from dynamo.common.security.files import Watched, in_thread
from dynamo.frontend.api.declaration import Charge, Declaration
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.security.accounts import ANONYMOUS, WITHOUT_KEY, Account, Clock, KeyAccount
from dynamo.frontend.security.derived_accounts import WithoutRequests
from dynamo.frontend.security.keys import ApiKey, KeyRing, check_blank, read_keys
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.security.sharing import Fleet, KeyUse
from dynamo.frontend.security.surfaces import SCOPES, Restriction, Surface

BROWSED = frozenset({Surface.DOCS, Surface.CONSOLE, Surface.METRICS})
"""Pages, which browsers may read with the key as the password of a Basic login."""

ADMIN = frozenset(
    {
        Surface.MODEL_REPOSITORY,
        Surface.LOGGING,
        Surface.TRACE,
        Surface.SHARED_MEMORY,
        Surface.THRESHOLDS,
        Surface.NAMES,
        Surface.USAGE,
    }
)
"""Refused attempts to use these are recorded."""

_COUNTED = frozenset({Charge.CALL, Charge.WORK})
_LOOK_S = 1.0

_log = logging.getLogger(__name__)
_audit = logging.getLogger(AUDIT)


class Guard:
    """Decides which calls of one protocol are admitted, and on whose account."""

    def __init__(
        self,
        accounts: Accounts | None,
        *,
        open_surfaces: Collection[Surface] = (),
        restrictions: Iterable[Restriction] = (),
    ) -> None:
        """If `accounts` is None, no key is needed."""
        self.accounts = accounts
        self._open = frozenset({Surface.HEALTH, *open_surfaces})
        self._restrictions = tuple(restrictions)
        self._credentials = frozenset({"authorization", "x-api-key", *(r.header for r in self._restrictions)})

    @property
    def requires_keys(self) -> bool:
        return self.accounts is not None

    @property
    def is_on(self) -> bool:
        return self.accounts is not None or bool(self._restrictions)

    def account_named(self, name: str, surface: Surface) -> Account:
        """Return the account of the key with this name, or that of requests without a key for none, if it may use a surface now.

        Raises Unauthenticated, Forbidden.
        """
        if self.accounts is None:
            if name:
                raise Unauthenticated("there are no API keys any more")
            return ANONYMOUS
        if not name and surface in self._open:
            return WITHOUT_KEY
        account = self.accounts.named(name)
        self._check_scope(account, surface)
        return account

    def stored_bytes(self, name: str) -> int | None:
        """Return how many bytes the key with this name may store; None without a limit."""
        return None if self.accounts is None else self.accounts.stored_bytes(name)

    def guards(self, surface: Surface) -> bool:
        """Return whether `enter` may refuse, or count, calls to this surface."""
        restricted = any(surface in restriction.surfaces for restriction in self._restrictions)
        return restricted or (self.accounts is not None and surface is not Surface.HEALTH)

    def check_unique(self, names: Iterable[str]) -> None:
        """Refuse a call with a credential twice, since proxies and servers differ on which of them counts.

        `names` are those of the call's headers, in lower case. Raises InvalidRequest.
        """
        seen = set()
        for name in names:
            if name in self._credentials:
                if name in seen:
                    raise InvalidRequest(f"the header '{name}' must not be given twice")
                seen.add(name)

    def enter(self, declared: Declaration, headers: Mapping[str, str], *, takes_login: bool = False) -> Account:
        """Return the account that a call of an operation is made for. `headers` have lower-case names.

        `takes_login`: the key may be the password of a Basic login, which browsers add to requests that any web page makes.

        Raises Unauthenticated, Forbidden, RateLimited.
        """
        surface = declared.surface
        for restriction in self._restrictions:
            if surface in restriction.surfaces and not _same(headers.get(restriction.header, ""), restriction.value):
                raise Forbidden(f"access is restricted: the header '{restriction.header}' is missing or wrong")
        if self.accounts is None or surface is Surface.HEALTH:
            return ANONYMOUS
        presented = _credential(headers, takes_login=takes_login)
        if not presented:
            if surface in self._open:
                return WITHOUT_KEY
            raise Unauthenticated("an API key is required, as 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        account = self.accounts.of(presented)
        self._check_scope(account, surface)
        if declared.charge in _COUNTED:
            account.count()
        return account if declared.charge is Charge.REQUESTS else WithoutRequests(account)

    def _check_scope(self, account: KeyAccount, surface: Surface) -> None:
        """Raises Forbidden."""
        if surface not in self._open and not account.key.may_use(SCOPES[surface]):
            raise Forbidden(f"the API key '{account.key.name}' lacks the scope '{SCOPES[surface]}'")


class Accounts:
    """The account of each key, shared by all protocols, and its limits by all frontends."""

    def __init__(
        self,
        keys: Watched[KeyRing],
        clock: Clock = time.monotonic,
        ledger: Ledger | None = None,
        fleet: Fleet | None = None,
        *,
        salts: bool = True,
    ) -> None:
        """`fleet`: who shares the limits, by default under a name drawn at random.

        `salts`: whether prompts that are cached for one key are kept apart from those of others.
        """
        self.ledger = ledger or Ledger()
        self.fleet = fleet or Fleet(secrets.token_hex(8))
        self._keys = keys
        self._clock = clock
        self._salts = salts
        self._ring = keys.current()
        self._by_name: dict[str, KeyAccount] = {}

    def of(self, presented: str) -> KeyAccount:
        """Return the account of a key. Raises Unauthenticated."""
        self._follow()
        key = self._ring.find(presented)
        if key is None:
            raise Unauthenticated("the API key is not valid")
        return self._account(key)

    def named(self, name: str) -> KeyAccount:
        """Return the account of the key with a name. Raises Unauthenticated."""
        self._follow()
        key = self._ring.by_name.get(name)
        if key is None:
            raise Unauthenticated(f"there is no API key '{name}' any more")
        return self._account(key)

    def stored_bytes(self, name: str) -> int | None:
        self._follow()
        key = self._ring.by_name.get(name)
        return None if key is None else key.limits.stored_bytes

    def _account(self, key: ApiKey) -> KeyAccount:
        account = self._by_name.get(key.name) or self._new(key)
        account.check_valid()
        return account

    def _new(self, key: ApiKey) -> KeyAccount:
        account = self._by_name[key.name] = KeyAccount(key, self._clock, self._follow, self.fleet, self.ledger, self._salts)
        return account

    # The part of `fleet.peers.limits.LimitTable`

    def used(self, names: Iterable[str]) -> list[KeyUse]:
        return [account.use() for name in names if (account := self._by_name.get(name)) is not None]

    def in_use(self) -> list[str]:
        return [name for name, account in self._by_name.items() if account.is_in_use]

    def apply(self, origin: str, use: KeyUse) -> None:
        account, key = self._by_name.get(use.name), self._ring.by_name.get(use.name)
        if account is None and key is not None:
            account = self._new(key)
        if account is not None:
            account.apply(origin, use)

    def forget(self, origin: str) -> None:
        for account in self._by_name.values():
            account.forget(origin)

    async def follow(self) -> None:
        """Look at the keys every second, so that a key that was withdrawn is not valid for the first request after a pause."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._follow()

    def _follow(self) -> None:
        ring = self._keys.current()
        if ring is self._ring:
            return
        self._ring = ring
        for name, account in list(self._by_name.items()):
            if (key := ring.by_name.get(name)) is not None:
                account.renew(key)
            else:
                account.withdrawn = True
                del self._by_name[name]


def make_guards(config: FrontendConfig, ledger: Ledger | None = None) -> tuple[Guard, Guard]:
    """Return the guards of HTTP and gRPC, which share keys and accounts, and log what they require. Raises ConfigError."""
    path = config.access.keys_file
    keys = None if path is None else watch_keys(path)
    accounts = None if keys is None else Accounts(keys, ledger=ledger, salts=config.access.cache_salt_per_key)
    http = Guard(accounts, open_surfaces=config.access.open_surfaces, restrictions=config.access.http_restrictions())
    grpc = Guard(accounts, open_surfaces=config.access.open_surfaces, restrictions=config.access.grpc_restrictions())
    _log_access(config, keys)
    return http, grpc


def watch_keys(path: Path) -> Watched[KeyRing]:
    """Raises ConfigError."""
    path = path.expanduser()
    return Watched(f"the key file {path}", (path,), lambda: read_keys(path), check=check_blank, run=in_thread)


def _log_access(config: FrontendConfig, keys: Watched[KeyRing] | None) -> None:
    ports = [("HTTP", config.http.host, config.http.is_local, config.http.tls is not None)]
    if config.grpc.wanted:
        ports.append(("gRPC", config.grpc.host, config.grpc.is_local, config.grpc.tls is not None))
    picker = config.endpoint_picker
    if picker.enabled:
        ports.append(("the endpoint picker", picker.host, picker.is_local, picker.port_tls.files is not None))
    if keys is not None:
        _log.info("API keys are required; the file contains %d", len(keys.current().keys))
    for name, host, is_local, is_secure in ports:
        if keys is None and is_local:
            _log.info("%s listens on %s without API keys: only this machine can connect", name, host)
        elif keys is None:
            _log.warning("%s listens on %s without API keys: every client that can connect may use everything", name, host)
        elif not is_local and not is_secure:
            _log.warning("%s listens on %s without TLS: API keys can be read on the network, unless a proxy ends TLS", name, host)


def record(action: str, account: Account, peer: str, request_id: str, outcome: str) -> None:
    """Log one action of an administrator."""
    name = f"key '{account.name}'" if account.name else "a caller without a key"
    fields = _fields(action, account.name, peer, request_id, outcome)
    _audit.info("%s by %s from %s, request %s: %s", action, name, peer, request_id, outcome, extra=fields)


def record_refusal(action: str, peer: str, request_id: str, error: DynamoError) -> None:
    fields = _fields(action, "", peer, request_id, error.code.value)
    _audit.warning("%s from %s, request %s: refused: %s", action, peer, request_id, error, extra=fields)


def _fields(action: str, key: str, peer: str, request_id: str, outcome: str) -> dict[str, str]:
    """Return the fields of a record in JSON. They include the id, because a refused request does not log under its own yet."""
    return {"action": action, "key": key, "peer": peer, "request_id": request_id, "outcome": outcome}


def _credential(headers: Mapping[str, str], *, takes_login: bool) -> str:
    scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    key = headers.get("x-api-key", "").strip()
    if takes_login and scheme.lower() == "basic" and not key:  # beside a key, a login may be that of a proxy in front
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except ValueError:  # no base64, or no text in it
            return ""
    return key


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode("utf-8", "surrogateescape"))
