"""Certificates for servers and clients. Every new connection has the newest ones; open connections go on with theirs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.config import ConfigError
from dynamo.common.security.files import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Of a server, in PEM."""

    cert: str
    """Its certificate and those that link it to a well-known one."""
    key: str
    client_ca: str | None = None
    """Clients must show a certificate signed by one of these."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContents:
    """What the files held when they were checked."""

    cert: bytes
    key: bytes
    client_ca: bytes | None = None


def read_contents(files: TlsFiles) -> TlsContents:
    """The files' bytes, which fit each other. Raises ConfigError."""
    read_context(files)
    return TlsContents(
        cert=_read(files.cert, "certificate"),
        key=_read(files.key, "key"),
        client_ca=None if files.client_ca is None else _read(files.client_ca, "client CA"),
    )


def read_context(files: TlsFiles) -> ssl.SSLContext:
    """For one server, as the files are now. Raises ConfigError with a sentence that names the file that is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, files.cert, files.key)
    if files.client_ca is not None:
        load_roots(context, files.client_ca, "client CA")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Raises ConfigError."""
    if b"-----BEGIN CERTIFICATE-----" not in _read(cert, "certificate"):
        raise ConfigError(f"the certificate file {cert} holds no certificate in PEM form")
    content = _read(key, "key")
    if b"PRIVATE KEY-----" not in content:
        raise ConfigError(f"the key file {key} holds no private key in PEM form")
    if b"ENCRYPTED" in content:
        raise ConfigError(f"the key file {key} is encrypted; servers need it without a passphrase")
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH" or error.reason == "KEY_TYPE_MISMATCH":
            raise ConfigError(f"the key in {key} does not belong to the certificate in {cert}") from error
        raise ConfigError(f"the certificate {cert} and key {key} cannot be used: {error.reason or error}") from error
    except OSError as error:
        raise ConfigError(f"the certificate {cert} and key {key} cannot be read: {error.strerror}") from error


def load_roots(context: ssl.SSLContext, path: str, what: str) -> None:
    """Raises ConfigError."""
    try:
        context.load_verify_locations(cadata=_read(path, what).decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the {what} file {path} holds no certificate in PEM form") from error


class RenewedContext(ssl.SSLContext):
    """Stands for whichever context is the newest when a connection is made."""

    newest: Watched[ssl.SSLContext]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.newest.current().wrap_bio(*args, **options)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server that outlives its certificate. Raises ConfigError."""
    context = RenewedContext(ssl.PROTOCOL_TLS_SERVER)
    context.newest = Watched(f"the certificate {files.cert}", files.paths, lambda: read_context(files))
    return context


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """For a client that reconnects for longer than its certificate is valid. Without `ca` the system's are trusted.

    Raises ConfigError.
    """

    def read() -> ssl.SSLContext:
        found = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca is not None:
            load_roots(found, ca, "CA")
        if cert is not None and key is not None:
            load_pair(found, cert, key)
        return found

    context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
    paths = [path for path in (ca, cert, key) if path is not None]
    context.newest = Watched(f"the certificate files {', '.join(paths)}", paths, read)
    return context


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the {what} file {path} cannot be read: {error.strerror}") from error
