"""Who this process is for the API server: files that the kubelet writes, and replaces every hour or so."""

from __future__ import annotations

import ssl
from pathlib import Path

from dynamo.common.config import ConfigError
from dynamo.common.security.files import Watched

_MAX_TOKEN_BYTES = 64 << 10


class ServiceAccount:
    """The token and the API server's authority, as the files are now."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if a file cannot be read."""
        token, authority = folder / "token", folder / "ca.crt"
        self._folder = folder
        self._token = Watched("the service account's token", [token], lambda: _read_token(token))
        self._tls = Watched("the certificate of the API server's authority", [authority], lambda: _read_authority(authority))

    def __repr__(self) -> str:
        return f"<ServiceAccount in {self._folder}>"

    def token(self) -> str:
        return self._token.current()

    def tls(self) -> ssl.SSLContext:
        """Return the context for a new connection, which trusts this authority only."""
        return self._tls.current()

    def namespace(self) -> str:
        """Return the namespace of the service account. Raises ConfigError."""
        return _read(self._folder / "namespace").strip()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TOKEN_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the service account's file {path} cannot be read: {error}") from error


def _read_token(path: Path) -> str:
    token = _read(path).strip()
    if not token or any(character.isspace() for character in token):
        raise ConfigError(f"the service account's file {path} holds no token")
    return token


def _read_authority(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate of the API server's authority, {path}, cannot be read: {error}") from error
