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
from urllib.parse import urlsplit

import msgspec
import yaml

from dynamo.common.config import ConfigError
from dynamo.worker.engine.remote.options import RemoteOptions


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
            parts = urlsplit(self.location)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            return f"{self.location} is not the URL of a server"
        return "'kv_replay' needs 'kv_events'" if self.kv_replay and not self.kv_events else ""


class _ServersFile(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[_FileEntry]


def read_servers(path: Path) -> tuple[ListedServer, ...]:
    """Return the servers that a file lists, in its order. Raises ConfigError for what cannot be read or used."""
    try:
        entries = msgspec.convert(yaml.safe_load(path.read_text()), _ServersFile).endpoints
    except OSError as error:
        raise ConfigError(f"--url-file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"--url-file {path} does not list engine servers: {error}") from error
    for number, entry in enumerate(entries, 1):
        if entry.problem:
            raise ConfigError(f"--url-file {path}, entry {number}: {entry.problem}")
    servers = (ListedServer(entry.location, entry.kv_events, entry.kv_replay, entry.endpoint) for entry in entries)
    return tuple(dict.fromkeys(servers))
