"""What connecting to NATS takes from its options: credentials and the TLS context. Needs no NATS library."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.common.config import ConfigError, FileSecret
from dynamo.common.errors import InvalidRequest
from dynamo.common.options import NatsOptions
from dynamo.common.security.tls import client_context

_CREDENTIALS = re.compile(
    rb"-+BEGIN NATS USER JWT-+\s+\S+\s+-+END NATS USER JWT-+.*?-+BEGIN USER NKEY SEED-+\s+(?P<seed>\S+)\s+-+END USER NKEY SEED-+",
    re.DOTALL,
)


def check_nats(options: NatsOptions) -> None:
    """Raises InvalidRequest for an address, a certificate or a file with credentials that cannot be used."""
    for server in options.servers:
        _check_address(server)
    if options.nkey_seed_file is not None:
        _check_seed(options.nkey_seed_file, _read(options.nkey_seed_file, "nkey seed").strip())
    if options.credentials_file is not None:
        match = _CREDENTIALS.search(_read(options.credentials_file, "credentials"))
        if match is None:
            raise InvalidRequest(f"NATS: the credentials file {options.credentials_file} does not hold a user's JWT and seed")
        _check_seed(options.credentials_file, match["seed"])
    nats_tls_context(options)


def current_secret(secret: str | None) -> str | None:
    """Return a password or token; if it came from a file, what the file holds now. Raises InvalidRequest."""
    if not isinstance(secret, FileSecret):
        return secret
    try:
        return str(secret.current())
    except ConfigError as error:
        raise InvalidRequest(f"NATS: {error}") from error


def nats_tls_context(options: NatsOptions) -> ssl.SSLContext | None:
    """Return the context for a TLS connection; None if nothing demands one. Raises InvalidRequest."""
    has_tls_scheme = any(server.startswith(("tls://", "wss://")) for server in options.servers)
    if not has_tls_scheme and options.tls_ca_file is None and options.tls_cert_file is None:
        return None
    try:
        return client_context(options.tls_ca_file, options.tls_cert_file, options.tls_key_file)
    except ConfigError as error:
        raise InvalidRequest(f"NATS: {error}") from error


def _check_address(server: str) -> None:
    url = urlsplit(server if "://" in server else f"nats://{server}")
    try:
        usable = (
            url.scheme in ("nats", "tls") and bool(url.hostname) and (url.port is None or url.port > 0) and url.path in ("", "/")
        )
    except ValueError:  # the port
        usable = False
    if not usable:
        raise InvalidRequest(f"NATS: {server!r} is not an address of the form nats://host:port")


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"NATS: the {what} file {path} cannot be read: {error.strerror}") from error


def _check_seed(path: str, seed: bytes) -> None:
    import nkeys  # type: ignore[import-untyped]  # few logins need it, and it takes 10 ms

    try:
        nkeys.from_seed(bytearray(seed)).wipe()
    except Exception:  # of several libraries, and none may be shown: it could quote the seed
        raise InvalidRequest(f"NATS: the file {path} holds no seed of an nkey") from None
