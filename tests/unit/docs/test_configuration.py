"""The configuration page and the processes' own views of each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.common.config import ConfigError, load, replacements
from dynamo.common.options import LogFormat
from dynamo.frontend.config import FrontendConfig
from dynamo.local.config import LocalConfig
from dynamo.worker.config import WorkerConfig

DOCS = Path(__file__).parents[3] / "docs"

SHARED_FILE = """
grpc_service: {host: 0.0.0.0, port: 8787, http_metrics_host: 0.0.0.0, http_metrics_port: 8788}
models:
  - name: tensor_model
    type: TensorBased
    inputs: [{name: input, datatype: FP32, shape: [1, 1024]}]
    outputs: [{name: output, datatype: FP32, shape: [1, 512]}]
worker: {models: [smollm2]}
local: {workers: 2}
log: {format: json}
"""


def test_names_and_values_go_with_the_second_release_after_their_successors_came() -> None:
    _, *releases = re.split(r"^## ", (DOCS.parent / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    recent = "".join(releases[:2])
    for cls in (FrontendConfig, WorkerConfig, LocalConfig):
        assert [old for old in replacements(cls) if f"`{old}`" not in recent] == []


def test_the_configuration_page_is_what_the_code_says() -> None:
    checked = subprocess.run(
        [sys.executable, str(DOCS / "make_configuration.py"), "--check"], capture_output=True, text=True, timeout=120, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_one_file_serves_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "dynamo.yaml"
    file.write_text(SHARED_FILE)
    environ = {"DYN_CONFIG": str(file)}
    frontend = load(FrontendConfig, [], environ, program="frontend")
    worker = load(WorkerConfig, [], environ, program="worker")
    local = load(LocalConfig, [], environ, program="local")
    assert (frontend.grpc.port, frontend.http.port, frontend.serving.models[0].name) == (8787, 8788, "tensor_model")
    assert worker.models == ("smollm2",)
    assert (local.workers, local.grpc_port) == (2, 8787)
    assert {frontend.log.format, worker.log.format, local.log.format} == {LogFormat.JSON}


def test_one_environment_serves_all_processes() -> None:
    environ = {"DYN_ROUTER_MODE": "random", "DYN_LEASE_TTL_S": "5", "DYN_LOCAL_WORKERS": "2"}
    assert load(WorkerConfig, [], environ, program="worker").lease_ttl_s == 5
    assert load(LocalConfig, [], environ, program="local").workers == 2
    with pytest.raises(ConfigError, match="unknown variable DYN_LEASE_TLL_S"):
        load(FrontendConfig, [], {**environ, "DYN_LEASE_TLL_S": "5"}, program="frontend")
