"""Cross-origin requests: which pages of other sites may use this server from a browser.

A browser asks first, by an OPTIONS request without credentials, so preflights are answered before any guard. But it does not ask
before requests that a form could make, and these act as well; so the guard refuses what is not allowed here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from dynamo.frontend.config import HttpOptions

Header: TypeAlias = tuple[bytes, bytes]

ANY = "*"
_MAX_AGE_S = 600
_EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "x-dynamo-explain"),
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Headers of responses that pages may read."""


class Cors:
    """Applies the options `allowed_…` of the HTTP server."""

    def __init__(self, options: HttpOptions) -> None:
        self._origins = frozenset(options.allowed_origins)
        self._methods = ", ".join(options.allowed_methods)
        self._headers = ", ".join(options.allowed_headers)
        self._credentials = options.allow_credentials

    def headers(self, request: Mapping[str, str]) -> tuple[Header, ...]:
        """Return the headers of the response to a request with these headers; none if it is not cross-origin, or not allowed."""
        origin = self._allowed(request)
        if not origin:
            return ()
        return (*self._of_origin(origin), (b"access-control-expose-headers", ", ".join(_EXPOSED).encode()))

    def preflight(self, method: str, request: Mapping[str, str]) -> tuple[Header, ...]:
        """Return the headers of the response to a preflight; none if the request is not one, or its origin is not allowed."""
        origin = self._allowed(request)
        wanted = request.get("access-control-request-method", "")
        if method != "OPTIONS" or not wanted or not origin:
            return ()
        # With credentials, browsers take `*` for a name, so what they ask for is allowed by name.
        methods = wanted if self._methods == ANY else self._methods
        headers = request.get("access-control-request-headers", "") if self._headers == ANY else self._headers
        return (
            *self._of_origin(origin),
            (b"access-control-allow-methods", methods.encode("latin-1")),
            (b"access-control-allow-headers", headers.encode("latin-1")),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        )

    def permits(self, method: str, request: Mapping[str, str]) -> bool:
        """Return whether the page of another origin that a browser makes the request for may do so."""
        is_allowed = ANY in self._origins or self.names(request)
        return is_allowed and (self._methods == ANY or method in self._methods.split(", "))

    def names(self, request: Mapping[str, str]) -> bool:
        """Return whether the page's origin is allowed by its name."""
        return request.get("origin", "") in self._origins - {ANY}

    @staticmethod
    def is_preflight(method: str, request: Mapping[str, str]) -> bool:
        """Whether a browser wants to know what it may request from another origin."""
        return method == "OPTIONS" and "origin" in request and "access-control-request-method" in request

    def _allowed(self, request: Mapping[str, str]) -> str:
        """Return the value of `Access-Control-Allow-Origin`; empty: there is none."""
        origin = request.get("origin", "") if self._origins else ""
        if origin and ANY in self._origins:
            return origin if self._credentials else ANY
        return origin if origin in self._origins else ""

    def _of_origin(self, origin: str) -> tuple[Header, ...]:
        headers: tuple[Header, ...] = ((b"access-control-allow-origin", origin.encode("latin-1")),)
        if origin != ANY:
            headers += ((b"vary", b"origin"),)
        if self._credentials:
            headers += ((b"access-control-allow-credentials", b"true"),)
        return headers
