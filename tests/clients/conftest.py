"""A deployment for clients of other projects, which have an environment of their own: see `make test-clients`."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

AGENTS_SDK = "test_openai_agents.py"
"""In an environment of its own: the SDK needs a later client of OpenAI than LlamaIndex takes."""
has_clients = find_spec("langchain") and find_spec("pydantic_ai")
collect_ignore_glob = (
    [] if has_clients else [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name != AGENTS_SDK]
)
if not find_spec("agents"):
    collect_ignore_glob.append(AGENTS_SDK)

LOCAL = os.environ.get("DYNAMO_LOCAL", ".venv/bin/dynamo-local")
AGENT = "sim:speedup=0,calls=1"
CLASSIFIER = f"{Path(__file__).parents[2]}/examples/classifier.py:Classifier"


class Deployment(NamedTuple):
    url: str
    grpc_target: str


@pytest.fixture(scope="session")
def url(deployment: Deployment) -> str:
    """The address of HTTP."""
    return deployment.url


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose model `sim` calls the tools that it is told to, and with a classifier."""
    http_port, grpc_port = _free_ports(2)
    folder = tmp_path_factory.mktemp("local")
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    command = (LOCAL, "--model", AGENT, "--model", CLASSIFIER, *ports, "--no-ask", "--folder", str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            _await_start(process)
            yield Deployment(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        finally:
            process.terminate()
            process.communicate(timeout=120)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _await_start(process: subprocess.Popen[str]) -> None:
    """Return when the deployment says that it serves."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            return
    pytest.fail(f"the deployment did not start: {''.join(lines)}")


@pytest.fixture(autouse=True)
def quiet_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the clients from other servers: keys that would be sent there, and statistics."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
