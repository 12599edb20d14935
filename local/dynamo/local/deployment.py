"""A whole deployment on one machine: etcd, nats-server, workers and a frontend, each a process of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from dynamo.common.config import ConfigError, load
from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.etcd import Etcd, connect_etcd
from dynamo.common.options import EtcdOptions
from dynamo.common.process.ports import free_ports
from dynamo.frontend.config import FrontendConfig
from dynamo.local.config import LocalConfig
from dynamo.local.logins import Login, make_login
from dynamo.local.servers import HOST, EtcdServer, NatsServer
from dynamo.local.supervisor import Report, Supervisor
from dynamo.local.view import read_instances, ready_workers, served_models
from dynamo.local.workers import Workers
from dynamo.planner.config import PlannerConfig
from dynamo.worker.config import TextOptions, WorkerConfig

HTTP_PORT, GRPC_PORT = 8000, 8001
_POLL_S = 0.1
_END_S = 10.0
"""What a worker takes to end after its drain and the closing of its engines."""
_ETCD_VARIABLES = ("DYN_ETCD_", "ETCD_AUTH_")
_NATS_VARIABLES = ("DYN_NATS_", "NATS_AUTH_")


@dataclass(frozen=True, slots=True)
class Backend:
    """An etcd or a NATS that the processes of the deployment use."""

    urls: tuple[str, ...]
    login: Login | None = None
    """None for servers that another program started: their logins are in the environment, which the processes inherit."""


class NotReady(DynamoError):
    """The workers did not come up in time, or the frontend."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running deployment, all of whose workers have registered, and whose frontend serves their models."""

    http: str
    """`http://127.0.0.1:8000`"""
    grpc: str
    """`127.0.0.1:8001`"""
    logs: Path
    instances: tuple[Instance, ...]
    etcd: EtcdOptions
    workers: Workers


async def start_deployment(config: LocalConfig, supervisor: Supervisor, report: Report) -> Deployment:
    """Start everything, with a line to `report` for each step; `supervisor` stops it: frontend, workers, nats-server, etcd.

    Raises ConfigError for a configuration that cannot be used, ServerFailed or ChildDied with the end of the log of what did
    not start, NotReady after `start_timeout_s`.
    """
    folder = config.folder.resolve()
    logs = folder / "logs"
    http = choose_port("--http-port", config.http_port, HTTP_PORT)
    grpc = choose_port("--grpc-port", config.grpc_port, GRPC_PORT)
    etcd = Backend(config.etcd_endpoints) if config.etcd_endpoints else await _start_etcd(supervisor, folder, report)
    nats = Backend(config.nats_servers) if config.nats_servers else await _start_nats(supervisor, config, folder, report)
    environment = child_environment(os.environ, config)
    shutil.rmtree(logs, ignore_errors=True)
    async with connect_etcd(_etcd_options(etcd)) as client:
        workers = _start_workers(config, etcd, nats, supervisor, logs, environment)
        supervisor.start({"frontend": frontend_command(config, etcd, nats, http, grpc)}, logs, environment)
        if config.planner:
            supervisor.start({"planner": planner_command(config, etcd, nats)}, logs, environment, is_essential=False)
        report(f"frontend     KServe v2 over gRPC at {HOST}:{grpc}, HTTP at http://{HOST}:{http}")
        report(f"workers      {config.workers}, loading {', '.join(config.models)}")
        instances = await supervisor.unless_died(_all_ready(client, config, workers, report))
    await supervisor.unless_died(_all_served(http, [model.card.name for model in served_models(instances)], config))
    return Deployment(f"http://{HOST}:{http}", f"{HOST}:{grpc}", logs, tuple(instances), _etcd_options(etcd), workers)


def check_flags(config: LocalConfig, environ: Mapping[str, str]) -> None:
    """Read the flags of the frontend, the workers and the planner as they will, before anything starts. Raises ConfigError."""
    etcd, nats = (Backend(urls or (f"{HOST}:1",)) for urls in (config.etcd_endpoints, config.nats_servers))
    ports = (config.http_port or HTTP_PORT, config.grpc_port or GRPC_PORT)
    environment = child_environment(environ, config)
    _, _, _, *frontend_flags = frontend_command(config, etcd, nats, *ports)
    load(FrontendConfig, frontend_flags, environment, program="dynamo-frontend")
    _worker_config(config, etcd, nats, environment)
    if config.planner:
        _, _, _, *planner_flags = planner_command(config, etcd, nats)
        load(PlannerConfig, planner_flags, environment, program="dynamo-planner")


def _worker_config(config: LocalConfig, etcd: Backend, nats: Backend, environment: Mapping[str, str]) -> WorkerConfig:
    """Return what a worker makes of its flags. Raises ConfigError."""
    _, _, _, *flags = worker_command(config, etcd, nats)
    return load(WorkerConfig, flags, environment, program="dynamo-worker")


def _start_workers(
    config: LocalConfig, etcd: Backend, nats: Backend, supervisor: Supervisor, logs: Path, environment: Mapping[str, str]
) -> Workers:
    worker = _worker_config(config, etcd, nats, environment)
    drain_s = worker.drain_timeout_s + worker.close_timeout_s + _END_S
    command = partial(worker_command, config, etcd, nats)
    return Workers(supervisor, command, config.workers, logs, environment, drain_s=drain_s, are_essential=not config.is_scaled)


async def _start_etcd(supervisor: Supervisor, folder: Path, report: Report) -> Backend:
    shutil.rmtree(folder / "etcd", ignore_errors=True)  # it would only hold registrations of instances that have ended
    login = make_login("root", folder / "logins" / "etcd")
    server = EtcdServer(folder / "etcd", fsync=False, login=login)
    await supervisor.start_server("etcd", server)
    report(f"etcd         {server.endpoint}, user {login.user}, password in {_from_here(login.file)}")
    return Backend((server.endpoint,), login)


async def _start_nats(supervisor: Supervisor, config: LocalConfig, folder: Path, report: Report) -> Backend:
    login = make_login("dynamo", folder / "logins" / "nats")
    server = NatsServer(folder / "nats", login=login, batch=config.nats_batch)
    await supervisor.start_server("nats-server", server)
    report(f"nats-server  {server.url}, user {login.user}, password in {_from_here(login.file)}")
    return Backend((server.url,), login)


def _from_here(path: Path) -> Path:
    """Return `path` relative to the working directory if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


async def _all_ready(client: Etcd, config: LocalConfig, workers: Workers, report: Report) -> list[Instance]:
    started = time.monotonic()
    ready = 0
    try:
        async with asyncio.timeout(config.start_timeout_s):
            while True:
                instances = await read_instances(client, config.namespace)
                if (now_ready := ready_workers(workers.serving(instances), len(config.models))) != ready:
                    ready = now_ready
                    report(f"             {ready} of {config.workers} ready after {time.monotonic() - started:.1f} s")
                if ready == config.workers:
                    return instances
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        text = f"only {ready} of {config.workers} workers were ready after {config.start_timeout_s:g} s"
        raise NotReady(f"{text}; --start-timeout allows more, and {config.folder}/logs may show why") from None


async def _all_served(http_port: int, models: Sequence[str], config: LocalConfig) -> None:
    pending = list(models)
    try:
        async with asyncio.timeout(config.start_timeout_s):
            while True:
                pending = [model for model in pending if not await _is_served(http_port, model)]
                if not pending:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        text = f"the frontend did not serve {', '.join(pending)} within {config.start_timeout_s:g} s"
        raise NotReady(f"{text}; {config.folder}/logs may show why") from None


async def _is_served(http_port: int, model: str) -> bool:
    """Return whether the frontend says that a model is ready; True, too, if it tells only who has a certificate or a key."""
    try:
        reader, writer = await asyncio.open_connection(HOST, http_port)
    except OSError:
        return False
    try:
        writer.write(f"GET /v2/models/{quote(model, safe='')}/ready HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        line = await reader.readline()
    except OSError:
        line = b""
    finally:
        writer.transport.abort()
    return not line.startswith(b"HTTP/") or line.split()[1] in (b"200", b"401", b"403")


def worker_command(config: LocalConfig, etcd: Backend, nats: Backend, process_name: str = "") -> list[str]:
    """Return the command of a worker; `process_name`: what its registration calls its process."""
    has_servers = any(
        flag.partition("=")[0] in ("--url", "--url-file") for flag in config.worker_flags
    )  # which have models of their own
    models = [] if has_servers else [part for model in config.models for part in ("--model", model)]
    threads = []
    if not any(flag.startswith("--threads") for flag in config.worker_flags):
        threads = ["--threads", str(max(1, (os.cpu_count() or 1) // config.workers))]
    names = [part for name in config.model_names for part in ("--model-name", name)]
    called = ["--process-name", process_name] if process_name else []
    flags = [*models, *names, *_text_flags(config), *threads, *called, *config.worker_flags]
    return [*_python("dynamo.worker", config, etcd, nats), *flags]


def _text_flags(config: LocalConfig) -> list[str]:
    """Return the options for language models that are set; a worker's own file may have the others."""
    text, default = config.text, TextOptions()
    given = {
        "--tool-call-parser": text.tool_parser if text.tool_parser != default.tool_parser else None,
        "--reasoning-parser": text.reasoning_parser if text.reasoning_parser != default.reasoning_parser else None,
        "--chat-template": text.chat_template,
    }
    return [part for flag, value in given.items() if value is not None for part in (flag, str(value))]


def frontend_command(config: LocalConfig, etcd: Backend, nats: Backend, http: int, grpc: int) -> list[str]:
    ports = ["--grpc", "--http-port", str(http), "--grpc-port", str(grpc)]
    return [*_python("dynamo.frontend", config, etcd, nats), *ports, *config.frontend_flags]


def planner_command(config: LocalConfig, etcd: Backend, nats: Backend) -> list[str]:
    modes = [value for flag in config.frontend_flags for name, _, value in [flag.partition("=")] if name == "--router-mode"]
    routing = [f"--whatif-router-mode={mode}" for mode in modes[-1:]]
    return [*_python("dynamo.planner", config, etcd, nats), *routing, *config.planner_flags]


def _python(module: str, config: LocalConfig, etcd: Backend, nats: Backend) -> list[str]:
    return [
        *(sys.executable, "-m", module, "--namespace", config.namespace),
        *("--etcd-endpoints", ",".join(etcd.urls), *_login_flags("etcd", etcd.login)),
        *("--nats-servers", ",".join(nats.urls), *_login_flags("nats", nats.login)),
    ]


def _login_flags(server: str, login: Login | None) -> list[str]:
    return [] if login is None else [f"--{server}-user", login.user, f"--{server}-password-file", str(login.file)]


def child_environment(environ: Mapping[str, str], config: LocalConfig) -> dict[str, str]:
    """Return `environ` without logins and certificates that are meant for other servers than those started here."""
    running_already = ((config.etcd_endpoints, _ETCD_VARIABLES), (config.nats_servers, _NATS_VARIABLES))
    prefixes = tuple(prefix for addresses, names in running_already if not addresses for prefix in names)
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def _etcd_options(etcd: Backend) -> EtcdOptions:
    if etcd.login is None:
        return EtcdOptions(endpoints=etcd.urls)
    return EtcdOptions(endpoints=etcd.urls, user=etcd.login.user, password=etcd.login.password)


def choose_port(flag: str, wanted: int | None, usual: int) -> int:
    """Return the wanted port, or the usual one if it is free, or any. Raises ConfigError if the wanted one is taken."""
    if wanted == 0:
        return free_ports(1)[0]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or usual))
        except OSError as error:
            if wanted is not None:
                raise ConfigError(f"{flag}: cannot listen on {HOST}:{wanted}: {error.strerror}") from error
            return free_ports(1)[0]
    return wanted or usual


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder's lock during the body. Raises ConfigError if another deployment holds it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--folder {folder} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--folder {folder} is in use by another dynamo-local; name another folder") from error
        yield
