"""Engine servers that a file lists, in the format of llm-d's `file-discovery`.

endpoints:
  - address: 10.0.0.1
    port: "8000"
  - url: https://gpu-7.example/vllm
    kv_events: tcp://gpu-7.example:5557
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import yaml

from dynamo.common.config import ConfigError
from dynamo.common.errors import InvalidRequest
from dynamo.common.http.client import parse_url, without_secrets
from dynamo.worker.engine.remote.options import RemoteOptions

MAX_FILE_BYTES = 256 << 10
"""Some thousand servers; a longer file would take seconds to read."""


@dataclass(frozen=True, slots=True)
class ListedServer:
    """An engine server, and what is said of it alone; what is not is empty."""

    url: str
    kv_events: str = ""
    kv_replay: str = ""
    endpoint: str = ""

    def options(self, common: RemoteOptions) -> RemoteOptions:
        """Return the options for this server alone; `common` has what all have in common."""
        return replace(
            common,
            url_file=None,
            urls=(self.url,),
            kv_events=_listed(self.kv_events),
            kv_replay=_listed(self.kv_replay),
            endpoints=_listed(self.endpoint),
        )


def _listed(value: str) -> tuple[str, ...]:
    return (value,) if value else ()


class _FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file: a server by `url`, or by `address` and `port`."""

    url: str = ""
    address: str = ""
    port: int | str = 80
    kv_events: str = ""
    kv_replay: str = ""
    endpoint: str = ""
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    """Like the two before, of files that llm-d reads; means nothing here."""

    @property
    def location(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.url or f"http://{host}:{self.port}"

    @property
    def problem(self) -> str:
        """What is wrong with it, or an empty string."""
        if bool(self.url) == bool(self.address):
            return "it needs either 'url', or 'address' and 'port'"
        try:
            parse_url(self.location)
        except InvalidRequest:
            return f"{without_secrets(self.location)} is not the URL of a server, which has no user, password or query"
        return "'kv_replay' needs 'kv_events'" if self.kv_replay and not self.kv_events else ""


class _ServersFile(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[_FileEntry]


def read_servers(path: Path) -> tuple[ListedServer, ...]:
    """Return the servers that a file lists, in its order. Raises ConfigError for what cannot be read or used."""
    try:
        entries = msgspec.convert(yaml.safe_load(_read(path)), _ServersFile).endpoints
    except OSError as error:
        raise ConfigError(f"--url-file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # yaml has all of them
        raise ConfigError(f"--url-file {path} does not list engine servers: {error}") from error
    servers: dict[tuple[str, str | None, int, str], ListedServer] = {}
    for number, entry in enumerate(entries, 1):
        if entry.problem:
            raise ConfigError(f"--url-file {path}, entry {number}: {entry.problem}")
        server = ListedServer(entry.location, entry.kv_events, entry.kv_replay, entry.endpoint)
        first = servers.setdefault(_place(server.url), server)
        if first != replace(server, url=first.url):
            raise ConfigError(f"--url-file {path}, entry {number}: {server.url} is listed before, with other fields")
    return tuple(servers.values())


def _read(path: Path) -> str:
    if not path.is_file() and path.exists():  # reading a pipe might never end
        raise ConfigError(f"--url-file {path} is no file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--url-file {path} has more than {MAX_FILE_BYTES} bytes")
    return data.decode()


def _place(url: str) -> tuple[str, str | None, int, str]:
    """Return what two spellings of the URL of one server have in common."""
    parts = parse_url(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path
