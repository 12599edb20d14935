"""What connecting to etcd takes from its options."""

from __future__ import annotations

import re

from dynamo.common.config import ConfigError
from dynamo.common.errors import InvalidRequest
from dynamo.common.options import EtcdOptions
from dynamo.common.security.tls import client_context

DEFAULT_PORT = 2379
_ENDPOINT = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+)(?::(?P<port>\d{1,5}))?/?")


def check_etcd(options: EtcdOptions) -> None:
    """Raises InvalidRequest if settings contradict one another or a file cannot be used."""
    uses_tls = uses_etcd_tls(options)
    secure = {parse_endpoint(endpoint, uses_tls)[1] for endpoint in options.endpoints}
    if len(secure) > 1:
        raise InvalidRequest("etcd endpoints mix http and https")
    if uses_tls and not all(secure):
        raise InvalidRequest("certificates are configured, but etcd's endpoints say http")
    if uses_tls:
        try:
            client_context(options.tls_ca_file, options.tls_cert_file, options.tls_key_file)
        except ConfigError as error:
            raise InvalidRequest(f"etcd: {error}") from error
    for name in ("timeout_s", "connect_timeout_s", "keepalive_s", "max_backoff_s"):
        if getattr(options, name) <= 0:
            raise InvalidRequest(f"etcd's {name} must be above 0")


def uses_etcd_tls(options: EtcdOptions) -> bool:
    """Return whether endpoints without a scheme speak TLS."""
    files = (options.tls_ca_file, options.tls_cert_file, options.tls_key_file)
    return any(files) or any(endpoint.startswith("https://") for endpoint in options.endpoints)


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
