"""Certificates for servers and clients. Each new connection uses the newest ones; open connections keep theirs."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.config import ConfigError
from dynamo.common.security.files import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of a server."""

    cert: str
    """The server's certificate, followed by the chain up to its root."""
    key: str
    client_ca: str | None = None
    """Clients must show a certificate signed by one of these."""
    ciphers: str | None = None
    """Suites for TLS 1.2 in OpenSSL's notation; None for OpenSSL's own choice."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContents:
    """The contents of the files when they were checked."""

    cert: bytes
    key: bytes
    client_ca: bytes | None = None


def read_contents(files: TlsFiles) -> TlsContents:
    """Read and check the files. Raises ConfigError if they cannot be read or do not belong together."""
    read_context(files)
    return TlsContents(
        cert=_read(files.cert, "certificate"),
        key=_read(files.key, "key"),
        client_ca=None if files.client_ca is None else _read(files.client_ca, "client CA"),
    )


def read_context(files: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return the context of a server from the current files, which offers `protocols` by ALPN.

    Raises ConfigError with a sentence that names the wrong file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # as OpenSSL 3 has it by default
    if protocols:
        context.set_alpn_protocols(protocols)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ciphers is not None:
        _set_ciphers(context, files.ciphers)
    load_pair(context, files.cert, files.key)
    if files.client_ca is not None:
        load_roots(context, files.client_ca, "client CA")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _set_ciphers(context: ssl.SSLContext, ciphers: str) -> None:
    """Raises ConfigError."""
    try:
        context.set_ciphers(ciphers)
    except ssl.SSLError as error:
        raise ConfigError(f"the cipher suites '{ciphers}' name none that OpenSSL has") from error


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
    """A context that delegates each new connection to the newest one."""

    newest: Watched[ssl.SSLContext]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        newest = self.newest.current()
        newest.sslobject_class = self.sslobject_class
        return newest.wrap_bio(*args, **options)


def server_context(files: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a context for a server that outlives its certificate, and offers `protocols` by ALPN. Raises ConfigError."""
    context = RenewedContext(ssl.PROTOCOL_TLS_SERVER)
    context.newest = Watched(f"the certificate {files.cert}", files.paths, lambda: read_context(files, protocols))
    return context


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return a context for a client that outlives its certificate. Without `ca` it trusts the system's certificates.

    Raises ConfigError.
    """

    def read() -> ssl.SSLContext:
        context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca is not None:
            load_roots(context, ca, "CA")
        if cert is not None and key is not None:
            load_pair(context, cert, key)
        return context

    context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
    paths = [path for path in (ca, cert, key) if path is not None]
    context.newest = Watched(f"the certificate files {', '.join(paths)}", paths, read)
    return context


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the {what} file {path} cannot be read: {error.strerror}") from error
