"""Systems under test as child processes on this machine: ours, and optionally NVIDIA Dynamo as the peer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from dynamo.common.process.ports import free_ports
from dynamo.local.servers import EtcdServer, NatsServer
from dynamo.protos.inference_pb2 import ModelReadyRequest, ModelReadyResponse

HERE = Path(__file__).parent
START_TIMEOUT_S = 400
PACED_TOKENS_PER_S = 40


@dataclass(slots=True)
class System:
    """A running deployment."""

    name: str
    grpc_port: int
    http_port: int
    pids: dict[str, int] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """By which a further process of ours joins."""
    frontend_ports: list[tuple[int, int]] = field(default_factory=list)
    """Ports of gRPC and HTTP of each of our frontends."""


@asynccontextmanager
async def process(
    command: Sequence[str], env: dict[str, str], log: Path, cwd: Path | None = None, *, own_group: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a child process during the body; end it by SIGTERM, by SIGKILL if it does not.

    With `own_group`, the processes that it started and left behind are killed, too.
    """
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            cwd=cwd,
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=own_group,
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), 15)
            except TimeoutError:
                child.kill()
                await child.wait()
        if own_group:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


@contextmanager
def logs_on_timeout(folder: Path) -> Iterator[None]:
    """Print the ends of the logs in `folder` if the body raises TimeoutError."""
    try:
        yield
    except TimeoutError:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
        raise


@asynccontextmanager
async def bus(stack_name: str, *, nats_batch: bool = True) -> AsyncIterator[tuple[Path, EtcdServer, NatsServer]]:
    """A folder, etcd and nats-server."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{stack_name}-") as folder:
        path = Path(folder)
        etcd, nats = EtcdServer(path / "etcd"), NatsServer(path / "nats", batch=nats_batch)
        await asyncio.gather(etcd.start(), nats.start())
        try:
            yield path, etcd, nats
        finally:
            await asyncio.gather(etcd.stop(), nats.stop())


@asynccontextmanager
async def ours(
    *,
    grpc_server: str = "auto",
    more_frontends: Sequence[str] = (),
    models: Sequence[str] = ("echo",),
    workers: int = 1,
    frontend_flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    wait_for: Sequence[str] = ("echo",),
    name: str = "",
    worker_command: Sequence[str] = (),
    frontend_command: Sequence[str] = ("-m", "dynamo.frontend"),
    nats_batch: bool = True,
    source_roots: Sequence[Path] = (),
) -> AsyncIterator[System]:
    """This project's frontend and workers; the latter run `worker_command` where one is given.

    `more_frontends` are the gRPC servers of further frontends. With `source_roots` the code is there instead of in this checkout.
    """
    async with AsyncExitStack() as stack:
        folder, etcd, nats = await stack.enter_async_context(bus("ours", nats_batch=nats_batch))
        env = {
            **os.environ,
            "DYN_ETCD_ENDPOINTS": etcd.endpoint,
            "DYN_NATS_SERVERS": nats.url,
            "DYN_LOG": "warning",
        }
        if source_roots:
            env["PYTHONPATH"] = os.pathsep.join(map(str, source_roots))
        servers = (grpc_server, *more_frontends)
        ports = free_ports(2 * len(servers))
        frontend_ports = list(zip(ports[::2], ports[1::2], strict=True))
        system = System(name or f"ours ({grpc_server})", *frontend_ports[0], {"nats": nats.pid}, env, frontend_ports)
        flags = [flag for model in models for flag in ("--model", model)]
        for index in range(workers):
            command = [sys.executable, *(worker_command or ("-m", "dynamo.worker", *flags, *worker_flags))]
            child = await stack.enter_async_context(process(command, env, folder / f"worker{index}.log"))
            system.pids[f"worker{index or ''}"] = child.pid
        for index, (server, (grpc_port, http_port)) in enumerate(zip(servers, frontend_ports, strict=True)):
            command = [
                *(sys.executable, *frontend_command, "--grpc", "--grpc-server", server),
                *("--grpc-port", str(grpc_port), "--http-port", str(http_port), *frontend_flags),
            ]
            name = f"frontend{index or ''}"
            child = await stack.enter_async_context(process(command, env, folder / f"{name}.log"))
            system.pids[name] = child.pid
        with logs_on_timeout(folder):
            for grpc_port, _ in frontend_ports:
                for model in wait_for:
                    await ready(grpc_port, model)
        yield system


@asynccontextmanager
async def peer(
    python: str,
    kind: str,
    plane: str = "nats",
    *,
    frontend_flags: Sequence[str] = (),
    mocker_flags: Sequence[str] = ("--speedup-ratio", "1000000"),
) -> AsyncIterator[System]:
    """NVIDIA Dynamo out of the environment of interpreter `python`.

    `kind`: `echo` and `tokens` for KServe gRPC, `mocker` and `paced` for HTTP.
    """
    async with AsyncExitStack() as stack:
        folder, etcd, nats = await stack.enter_async_context(bus("peer"))
        env = {
            **os.environ,
            "ETCD_ENDPOINTS": etcd.endpoint,
            "NATS_SERVER": nats.url,
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            "DYN_REQUEST_PLANE": plane,
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        }
        env.pop("PYTHONPATH", None)  # its package is named dynamo, too
        port, metrics_port = free_ports(2)
        system = System(f"peer ({plane})", port, port, {"nats": nats.pid})
        flags = ["--http-host", "127.0.0.1", "--http-port", str(port), *frontend_flags]
        if kind in ("mocker", "paced"):
            flags += ["--event-plane", "nats"]
        else:
            flags += ["--kserve-grpc-server", "--grpc-metrics-port", str(metrics_port), "--request-plane", plane]
        await make_model(python, folder)
        child = await stack.enter_async_context(
            process([python, "-m", "dynamo.frontend", *flags], env, folder / "frontend.log", folder)
        )
        system.pids["frontend"] = child.pid
        command = {
            "echo": [python, str(HERE / "peer" / "echo_worker.py")],
            "tokens": [python, str(HERE / "peer" / "token_worker.py")],
            "paced": [python, str(HERE / "peer" / "token_worker.py"), str(PACED_TOKENS_PER_S)],
            "mocker": [
                python,
                "-m",
                "dynamo.mocker",
                "--model-path",
                "model",
                "--model-name",
                "m",
                *mocker_flags,
                *("--event-plane", "nats"),
            ],
        }[kind]
        child = await stack.enter_async_context(process(command, env, folder / "worker.log", folder))
        system.pids["worker"] = child.pid
        with logs_on_timeout(folder):
            if kind in ("mocker", "paced"):
                await http_ready(port)
            else:
                await ready(port, {"echo": "echo", "tokens": "m"}[kind])
        yield system


async def make_model(python: str, folder: Path) -> None:
    """A folder `model` with a small tokenizer and the files that the peer's text path needs beside it."""
    child = await asyncio.create_subprocess_exec(python, str(HERE / "peer" / "make_model.py"), cwd=folder)
    if await child.wait():
        raise RuntimeError("the tokenizer could not be made")


def words_of(tokenizer: Path) -> list[str]:
    """Words that are one token each behind a space."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    return sorted(token[1:] for token in vocabulary if re.fullmatch("Ġ[a-z]{4,}", token))


async def ready(port: int, model: str) -> None:
    """Return when a model is ready over gRPC. Raises TimeoutError."""
    async with asyncio.timeout(START_TIMEOUT_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        model_ready = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelReady",
            request_serializer=ModelReadyRequest.SerializeToString,
            response_deserializer=ModelReadyResponse.FromString,
        )
        while True:
            try:
                if (await model_ready(ModelReadyRequest(name=model), timeout=5)).ready:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.2)


async def http_ready(port: int) -> None:
    """Returns when some model is listed over HTTP. Raises TimeoutError."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                response = await reader.read()
                writer.close()
                if b'"id"' in response:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)
