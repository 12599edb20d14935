"""Groups of options that several processes share: addresses and credentials of NATS and etcd, logging, tracing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.common.config import option, parse_bytes

_INBOX_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsOptions:
    """Addresses of NATS and credentials for it. Use with `group("NATS", prefix="nats")`."""

    servers: tuple[str, ...] = option(
        ("nats://127.0.0.1:4222",),
        env=("DYN_NATS_SERVERS", "NATS_SERVER", "NATS_URL"),
        repeatable=True,
        metavar="URL",
        help="Addresses of the NATS cluster, separated by commas.",
    )
    user: str | None = option(None, env=("DYN_NATS_USER", "NATS_AUTH_USERNAME"), help="User name.")
    password: str | None = option(
        None, env=("DYN_NATS_PASSWORD", "NATS_AUTH_PASSWORD"), secret=True, help="Password of the user."
    )
    token: str | None = option(None, env=("DYN_NATS_TOKEN", "NATS_AUTH_TOKEN"), secret=True, help="Access token.")
    nkey_seed_file: str | None = option(
        None, env=("DYN_NATS_NKEY_SEED_FILE", "NATS_AUTH_NKEY"), metavar="FILE", help="Seed file of an nkey."
    )
    credentials_file: str | None = option(
        None,
        env=("DYN_NATS_CREDENTIALS_FILE", "NATS_AUTH_CREDENTIALS_FILE"),
        metavar="FILE",
        help="Credentials file (JWT and nkey).",
    )
    inbox_prefix: str | None = option(
        None,
        metavar="SUBJECT",
        help="Where nats-server responds to this process; default: _INBOX_frontend of frontends, _INBOX_worker of workers.",
    )
    tls_ca_file: str | None = option(None, metavar="FILE", help="CA certificates to trust; makes the connection use TLS.")
    tls_cert_file: str | None = option(None, metavar="FILE", help="Client certificate, for servers that require one.")
    tls_key_file: str | None = option(None, metavar="FILE", help="Key of the client certificate.")
    reconnect_wait_s: float = 0.25
    """Pause before an attempt to reconnect."""
    ping_interval_s: float = 1.0
    silence_s: float = 6.0
    """A connection on which nats-server sends nothing for this long, though pinged, is given up."""

    def __post_init__(self) -> None:
        _check_pair("--nats-tls-cert-file", self.tls_cert_file, "--nats-tls-key-file", self.tls_key_file)
        _check_pair("--nats-user", self.user, "--nats-password-file", self.password)
        if not self.servers:
            raise ValueError("--nats-servers names no server")
        if self.inbox_prefix is not None and not _INBOX_PREFIX.fullmatch(self.inbox_prefix):
            raise ValueError(
                "--nats-inbox-prefix must be letters, digits, '_' and '-' in at most 8 parts of 64, separated by dots, "
                f"got {self.inbox_prefix[:100]!r}"
            )
        _check_addresses("--nats-servers", self.servers, "--nats-user with --nats-password-file, or --nats-token-file")
        ways = (
            ("--nats-user", self.user),
            ("--nats-token-file", self.token),
            ("--nats-nkey-seed-file", self.nkey_seed_file),
            ("--nats-credentials-file", self.credentials_file),
        )
        used = [flag for flag, value in ways if value is not None]
        if len(used) > 1:
            raise ValueError(f"{' and '.join(used)} are different ways to log in to NATS; keep one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Addresses of etcd and credentials for it. Use with `group("etcd", prefix="etcd")`."""

    endpoints: tuple[str, ...] = option(
        ("http://127.0.0.1:2379",),
        env=("DYN_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"),
        repeatable=True,
        metavar="URL",
        help="Addresses of the etcd cluster, separated by commas.",
    )
    user: str | None = option(None, env=("DYN_ETCD_USER", "ETCD_AUTH_USERNAME"), help="User name.")
    password: str | None = option(
        None, env=("DYN_ETCD_PASSWORD", "ETCD_AUTH_PASSWORD"), secret=True, help="Password of the user."
    )
    tls_ca_file: str | None = option(
        None, env=("DYN_ETCD_TLS_CA_FILE", "ETCD_AUTH_CA"), metavar="FILE", help="CA certificates to trust."
    )
    tls_cert_file: str | None = option(
        None,
        env=("DYN_ETCD_TLS_CERT_FILE", "ETCD_AUTH_CLIENT_CERT"),
        metavar="FILE",
        help="Client certificate, for servers that require one.",
    )
    tls_key_file: str | None = option(
        None, env=("DYN_ETCD_TLS_KEY_FILE", "ETCD_AUTH_CLIENT_KEY"), metavar="FILE", help="Key of the client certificate."
    )
    server_name: str | None = None
    """The name that the servers' certificates must have, where it is not the endpoint's host."""
    timeout_s: float = 5.0
    """Limit of one call, all its attempts together."""
    connect_timeout_s: float = 2.0
    keepalive_s: float = 10.0
    """A silent connection is pinged after it, and given up after half of it again. etcd refuses pings below 5 s."""
    max_backoff_s: float = 2.0
    """Longest pause between two attempts while etcd is away."""

    def __post_init__(self) -> None:
        _check_pair("--etcd-tls-cert-file", self.tls_cert_file, "--etcd-tls-key-file", self.tls_key_file)
        _check_pair("--etcd-user", self.user, "--etcd-password-file", self.password)
        if not self.endpoints:
            raise ValueError("--etcd-endpoints names no server")
        _check_addresses("--etcd-endpoints", self.endpoints, "--etcd-user with --etcd-password-file")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryOptions:
    """Bodies by reference between processes of one host. Use with `group("Shared memory", prefix="shared_memory")`."""

    dir: Path = option(
        Path("/dev/shm"),  # noqa: S108  # files in it are private and have unpredictable names
        parse=Path,
        metavar="FOLDER",
        help="Folder in memory that the processes of a host have in common, for large tensors between them.",
    )
    size: int = option(
        256 * 2**20,
        parse=parse_bytes,
        minimum=0,
        maximum=2**40,
        help="How much of it this process may occupy, as far as it is in use; 0: none. What finds no room travels through NATS.",
    )
    threshold: int = option(
        32 * 2**10, parse=parse_bytes, minimum=1, help="Smaller bodies of requests and responses always travel through NATS."
    )


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def parse_log_levels(text: str) -> tuple[tuple[str, int], ...]:
    """`info,dynamo.worker=debug` as (logger name, level of `logging`) pairs; the name of the first is empty: the root."""
    names = {"debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40}
    levels = {"": names["info"]}
    for part in filter(None, (part.strip() for part in text.split(","))):
        target, _, level = part.rpartition("=")
        if level.lower() not in names:
            raise ValueError(f"names the level {level!r}; there are debug, info, warning and error")
        levels[target] = names[level.lower()]
    return tuple(levels.items())


def _log_level(text: str) -> str:
    parse_log_levels(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is logged, and how. Use with `group("Logging", prefix="log")`."""

    level: str = option(
        "info",
        env=("DYN_LOG",),
        parse=_log_level,
        help="Least severe messages to log: debug, info, warning or error; also per logger: info,dynamo.worker=debug.",
    )
    format: LogFormat = option(LogFormat.TEXT, parse=LogFormat, help="Text for people, or one JSON object per line.")
    file: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="File to which lines are appended instead of standard error. Processes may share it; it is opened again when it was "
        "moved away.",
    )


def _otlp_endpoint(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return text


class TraceMode(StrEnum):
    """Where the traces go that trace settings switch on."""

    TRITON = "triton"
    OPENTELEMETRY = "opentelemetry"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Where traces go. Use with `group("Tracing", prefix="trace")`."""

    otlp_endpoint: str | None = option(
        None,
        flags=("--otlp-endpoint",),
        env=("DYN_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        parse=_otlp_endpoint,
        metavar="URL",
        help="Collector that gets traces, by OTLP over gRPC, as in http://localhost:4317; needs the extra `otel`. Default: none.",
    )
    sample_ratio: float = option(
        0.1,
        minimum=0,
        maximum=1,
        help="Share traced of the requests that come without a trace context; with one, the caller has decided.",
    )
    file: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="Lets clients switch on traces in Triton's format, by trace settings. Workers write them to files of this path with "
        "the instance in the name; frontends need the same option. Default: clients cannot.",
    )
    mode: TraceMode = option(
        TraceMode.TRITON,
        parse=TraceMode,
        help="Where traces go that trace settings switch on: `triton`, to --trace-file, or `opentelemetry`, to --otlp-endpoint.",
    )
    file_max_bytes: int = option(
        2**30, parse=parse_bytes, minimum=1, help="Of all trace files that a worker writes; later traces are dropped."
    )

    def __post_init__(self) -> None:
        if self.mode is TraceMode.OPENTELEMETRY and self.otlp_endpoint is None:
            raise ValueError("--trace-mode opentelemetry needs --otlp-endpoint as well")


def _check_addresses(flag: str, addresses: tuple[str, ...], login: str) -> None:
    """`login` is how logins are given, which addresses must not hold."""
    for address in addresses:
        if "@" in address:
            raise ValueError(f"{flag} holds a login, which logs and the process list would show; use {login}")
        try:
            url = urlsplit(address if "://" in address else f"//{address}")
            is_address = bool(url.hostname) and url.port != 0 and not re.search(r"\s", address)
        except ValueError:  # the port is no number, or the host is no IPv6 address
            is_address = False
        if not is_address:
            raise ValueError(f"{flag}: {address!r} is not the address of a server: a URL, or host:port")


def _check_pair(first: str, one: str | None, second: str, other: str | None) -> None:
    if (one is None) != (other is None):
        given, missing = (first, second) if one is not None else (second, first)
        raise ValueError(f"{given} needs {missing} as well")
