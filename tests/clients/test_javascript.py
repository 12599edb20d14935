"""Clients in JavaScript, with the packages of npm: the example, the SDKs of OpenAI and Anthropic, Vercel's AI SDK."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=dict(os.environ))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example beside the protos, with its packages."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    root = tmp_path_factory.mktemp("js")
    (root / "protos").symlink_to(ROOT / "protos")
    copy = Path(shutil.copytree(ROOT / "examples/clients/js", root / "examples/clients/js"))
    installed = run(copy, "npm", "install", "--no-audit", "--no-fund")
    assert installed.returncode == 0, installed.stderr
    return copy


def test_it_streams_a_text_and_runs_a_tensor_model(folder: Path, deployment: Any) -> None:
    client = ("node", "client.js", deployment.grpc_target)
    text = run(folder, *client, "text", "sim", "Hello")
    assert (text.returncode, text.stderr) == (0, "") and text.stdout.strip()
    tensors = run(folder, *client, "classify", "classifier")
    assert (tensors.returncode, tensors.stderr) == (0, "") and "digit INT64 [ '1' ]" in tensors.stdout
    refused = run(folder, *client, "classify", "missing")
    assert (refused.returncode, refused.stderr.strip()) == (1, "5 NOT_FOUND: Request for unknown model: 'missing' is not found")


def test_types_for_typescript_are_made_from_the_protos(folder: Path) -> None:
    made = run(folder, "npm", "run", "-s", "stubs")
    assert made.returncode == 0, made.stderr
    service = (folder / "types/inference/GRPCInferenceService.ts").read_text()
    assert "ModelStreamInfer(" in service
    assert "'raw_input_contents'?" in (folder / "types/inference/ModelInferRequest.ts").read_text()


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tool loops with their SDKs."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    copy = Path(shutil.copytree(Path(__file__).parent / "js", tmp_path_factory.mktemp("agents") / "js"))
    installed = run(copy, "npm", "install", "--no-audit", "--no-fund")
    assert installed.returncode == 0, installed.stderr
    return copy


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("sdk", ["chat", "responses", "anthropic", "vercel"])
def test_a_tool_loop_of_an_sdk_for_node(agents: Path, url: str, sdk: str, mode: str) -> None:
    done = run(agents, "node", "agents.mjs", url, sdk, mode)
    assert (done.returncode, done.stdout.strip()) == (0, "The tools returned: 42"), done.stderr
