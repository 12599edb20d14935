"""The example clients in Go, built and run where a Go toolchain is installed, and for gRPC Debian's libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.compiled_clients import GO, HAS_GO_GRPC, build_go_client, run
from tests.support.processes import FrontendProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow  # compiles Go's standard library and gRPC's
@pytest.mark.skipif(GO is None, reason="no Go toolchain is installed")
async def test_the_client_in_go_streams_a_chat_asks_a_classifier_and_says_what_is_wrong(
    deployment: FrontendProcess, tmp_path: Path
) -> None:
    env = {**os.environ, "GOCACHE": str(tmp_path / "cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
    client = str(tmp_path / "client")
    status, _, errors = await run(str(GO), "build", "-o", client, ".", folder=EXAMPLES / "clients" / "go", env=env)
    assert status == 0, errors
    where = (client, "-url", f"http://127.0.0.1:{deployment.http_port}")
    question = "Zürich?"
    status, output, errors = await run(*where, "-chat", "echo-llm", question)
    assert (status, errors) == (0, "")
    assert output.startswith(f"user: {question}\nassistant: user: {question}")  # it says its prompt again, 128 bytes long
    status, output, errors = await run(*where, "-classify", "classifier")
    assert (status, errors) == (0, "")
    assert "digit [7]" in output
    status, output, errors = await run(*where, "-classify", "missing")
    assert (status, errors.strip()) == (1, "404: Request for unknown model: 'missing' is not found")
    if HAS_GO_GRPC:
        source = EXAMPLES / "clients/go-grpc/main.go"
        await checked_over_grpc(await build_go_client(source, tmp_path / "grpc", tmp_path / "cache"), deployment.grpc_target)


async def checked_over_grpc(client: str, target: str) -> None:
    status, output, errors = await run(client, "-target", target, "-text", "echo-llm", "Zürich?")
    assert (status, errors) == (0, "")
    assert output.startswith("Zürich?")
    status, output, errors = await run(client, "-target", target, "-classify", "classifier", "-requests", "50")
    assert (status, errors) == (0, "")
    assert "digit INT64 [1]: 8 bytes" in output and "50 requests over 4 connections" in output
    status, _, errors = await run(client, "-target", target, "-classify", "missing")
    assert status == 1 and "code = NotFound desc = Request for unknown model: 'missing' is not found" in errors
