"""Addresses of etcd and credentials for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dynamo.common.config import ConfigError
from dynamo.common.errors import InvalidRequest
from dynamo.common.security.tls import client_context

DEFAULT_PORT = 2379
_ENDPOINT = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+)(?::(?P<port>\d{1,5}))?/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Settings of one etcd client. Neither `repr` nor any error or log line shows the password."""

    endpoints: tuple[str, ...] = (f"http://127.0.0.1:{DEFAULT_PORT}",)
    """Members of one cluster: `http://host:port`, `https://host:port` or `host:port`; host names and IPv4 or [IPv6]."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    """PEM file that signs the servers' certificates. TLS without it trusts the system's."""
    cert_file: str | None = None
    """PEM client certificate (mTLS); needs `key_file`. Both are read anew for each connection, so they may rotate."""
    key_file: str | None = None
    server_name: str | None = None
    """The name that the servers' certificates must have, where it is not the endpoint's host."""
    timeout_s: float = 5.0
    """Limit of one call, all its attempts together."""
    connect_timeout_s: float = 2.0
    keepalive_s: float = 10.0
    """A silent connection is pinged after it, and given up after half of it again. etcd refuses pings below 5 s."""
    max_backoff_s: float = 2.0
    """Longest pause between two attempts while etcd is away."""

    def check(self) -> EtcdConfig:
        """Return itself. Raises InvalidRequest if settings contradict one another or a file cannot be used."""
        if not self.endpoints:
            raise InvalidRequest("no etcd endpoint is configured")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("etcd's cert_file and key_file belong together; one of them is missing")
        if (self.user is None) != (self.password is None):
            raise InvalidRequest("etcd's user and password belong together; one of them is missing")
        secure = {parse_endpoint(endpoint, self.uses_tls)[1] for endpoint in self.endpoints}
        if len(secure) > 1:
            raise InvalidRequest("etcd endpoints mix http and https")
        if self.uses_tls and not all(secure):
            raise InvalidRequest("certificates are configured, but etcd's endpoints say http")
        if self.uses_tls:
            try:
                client_context(self.ca_file, self.cert_file, self.key_file)
            except ConfigError as error:
                raise InvalidRequest(f"etcd: {error}") from error
        for name in ("timeout_s", "connect_timeout_s", "keepalive_s", "max_backoff_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"etcd's {name} must be above 0")
        return self

    @property
    def uses_tls(self) -> bool:
        files = (self.ca_file, self.cert_file, self.key_file)
        return any(files) or any(endpoint.startswith("https://") for endpoint in self.endpoints)


def parse_endpoint(endpoint: str, default_tls: bool) -> tuple[str, bool]:
    """`host:port` and whether it speaks TLS; raises InvalidRequest."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise InvalidRequest(f"{endpoint!r} is not an etcd endpoint of the form http://host:port")
    port = int(match["port"] or DEFAULT_PORT)
    if not 0 < port < 65_536:
        raise InvalidRequest(f"the port of etcd endpoint {endpoint!r} is not between 1 and 65535")
    tls = match["scheme"] == "https" if match["scheme"] else default_tls
    return f"{match['host']}:{port}", tls
