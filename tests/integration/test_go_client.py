"""The example clients in Go, built and run where a Go toolchain is installed, and for gRPC Debian's libraries."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer

EXAMPLES = Path(__file__).parents[2] / "examples"
GO = shutil.which("go")
LIBRARIES = Path("/usr/share/gocode")
"""Where Debian's golang-google-grpc-dev puts its sources."""
HAS_GRPC = (LIBRARIES / "src/google.golang.org/grpc").exists() and bool(
    shutil.which("protoc") and shutil.which("protoc-gen-go-grpc")
)


async def run(*command: str, folder: Path | None = None, env: dict[str, str] | None = None) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=env, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def grpc_client(folder: Path, cache: Path) -> str:
    """Build the example's client over gRPC in `folder`, with Debian's libraries instead of modules."""
    package = folder / "src/example.org/dynamo-grpc-client"
    package.mkdir(parents=True)
    shutil.copy(EXAMPLES / "clients/go-grpc/main.go", package)
    status, _, errors = await run(str(EXAMPLES / "clients/go-grpc/make-stubs.sh"), str(package))
    assert status == 0, errors
    env = {**os.environ, "GOPATH": f"{folder}:{LIBRARIES}", "GO111MODULE": "off", "GOCACHE": str(cache)}
    client = str(folder / "client")
    status, _, errors = await run(str(GO), "build", "-o", client, ".", folder=package, env=env)
    assert status == 0, errors
    return client


@pytest.mark.skipif(GO is None, reason="no Go toolchain is installed")
@pytest.mark.timeout(180)
async def test_the_client_in_go_streams_a_chat_asks_a_classifier_and_says_what_is_wrong(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    env = {**os.environ, "GOCACHE": str(tmp_path / "cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
    client = str(tmp_path / "client")
    status, _, errors = await run(str(GO), "build", "-o", client, ".", folder=EXAMPLES / "clients" / "go", env=env)
    assert status == 0, errors
    models = ("--model", "echo:llm", "--model", f"{EXAMPLES}/classifier.py:Classifier")
    async with (
        worker(etcd_server, nats_server, namespace, *models),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves("echo-llm", "classifier")
        where = (client, "-url", f"http://127.0.0.1:{front.http_port}")
        question = "Zürich?"
        status, output, errors = await run(*where, "-chat", "echo-llm", question)
        assert (status, errors) == (0, "")
        assert output.startswith(f"user: {question}\nassistant: user: {question}")  # it says its prompt again, 128 bytes long
        status, output, errors = await run(*where, "-classify", "classifier")
        assert (status, errors) == (0, "")
        assert "digit [7]" in output
        status, output, errors = await run(*where, "-classify", "nobody")
        assert (status, errors.strip()) == (1, "404: Request for unknown model: 'nobody' is not found")
        if HAS_GRPC:
            await checked_over_grpc(await grpc_client(tmp_path / "grpc", tmp_path / "cache"), front.grpc_target)


async def checked_over_grpc(client: str, target: str) -> None:
    status, output, errors = await run(client, "-target", target, "-text", "echo-llm", "Zürich?")
    assert (status, errors) == (0, "")
    assert output.startswith("Zürich?")
    status, output, errors = await run(client, "-target", target, "-classify", "classifier", "-requests", "50")
    assert (status, errors) == (0, "")
    assert "digit INT64 [1]: 8 bytes" in output and "50 requests over 4 connections" in output
    status, _, errors = await run(client, "-target", target, "-classify", "nobody")
    assert status == 1 and "code = NotFound desc = Request for unknown model: 'nobody' is not found" in errors
