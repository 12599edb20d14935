"""The Helm chart: its values fit its schema, and with the defaults it installs what `deploy/k8s/base` does.

Rendering needs the package helm-python-sdk (244 MB), in an environment of its own whose Python HELM_PYTHON names:

    python -m venv /tmp/helm && /tmp/helm/bin/pip install helm-python-sdk==0.2.2
    HELM_PYTHON=/tmp/helm/bin/python pytest tests/unit/deploy/test_helm_chart.py
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dynamo.common.config import load
from dynamo.frontend.config import FrontendConfig, RouterMode
from dynamo.worker.config import WorkerConfig
from tests.support.manifests import (
    BASE,
    DEPLOY,
    Manifest,
    Placed,
    manifest_files,
    of_kind,
    parse,
    pod_containers,
    render,
    workloads,
)

CHART = DEPLOY / "helm" / "dynamo"
DEFAULTS: Mapping[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Mapping[str, Any] = json.loads((CHART / "values.schema.json").read_text())
PYTHON = os.environ.get("HELM_PYTHON") or (sys.executable if find_spec("helm_python") else None)
SECRETS = {
    "dynamo-nats-auth": {"frontend-password": "pf", "worker-password": "pw"},
    "keys": {"keys.yaml": "[]"},
    "front-tls": {"tls.crt": "certificate", "tls.key": "key"},
}

MONITORED: Mapping[str, Any] = {"podMonitor": {"enabled": True, "apiKeySecret": "metrics-key"}}

rendering = pytest.mark.skipif(
    PYTHON is None, reason="helm-python-sdk is not installed; HELM_PYTHON can name a Python that has it"
)

_HASHED_NAME = re.compile(r"^(dynamo(?:-nats)?)-[a-z0-9]{10}$")
_RENDER = """
import json, sys
from helm_python import chart
path, values = sys.argv[1], json.loads(sys.argv[2])
report = chart.lint(path, values, strict=True)
with chart.Chart.load(path) as loaded:
    rendered = loaded.render(values, name="dynamo", namespace="dynamo")
print(json.dumps({"lint": report, "rendered": rendered}))
"""


def helm(values: Mapping[str, Any]) -> tuple[Manifest, ...]:
    """The chart rendered as release `dynamo`; lint must find nothing. Raises CalledProcessError for values it refuses."""
    assert PYTHON is not None
    command = [PYTHON, "-c", _RENDER, str(CHART), json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    done.check_returncode()
    answer = json.loads(done.stdout)
    serious = [message for message in answer["lint"].get("messages", ()) if message.get("severity", 0) not in ("INFO", "info", 1)]
    assert not serious, serious
    return tuple(found for text in answer["rendered"].values() for found in parse(text))


def merged(*changes: Mapping[str, Any]) -> dict[str, Any]:
    def into(target: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in change.items():
            target[name] = into(target[name], value) if isinstance(value, dict) and isinstance(target.get(name), dict) else value
        return target

    values = copy.deepcopy(dict(DEFAULTS))
    for change in changes:
        into(values, change)
    return values


def test_the_defaults_fit_the_schema() -> None:
    jsonschema.validate(DEFAULTS, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        {"frontend": {"routerMode": "best"}},
        {"frontend": {"replicas": 3}},
        {"frontend": {"extraArgs": ["router-mode=kv"]}},
        {"frontend": {"httpTls": True}},
        {"frontend": {"apiKeysSecret": "Keys"}},
        {"pools": {"default": {"models": []}}},
        {"pools": {"Default_": {"models": ["echo"], "resources": {"requests": {"cpu": 1}}}}},
        {"etcd": {"enabled": False}},
        {"etcd": {"replicas": 2}},
        {"nats": {"enabled": False, "servers": ["nats.example:4222"]}},
        {"images": {"registry": "registry.example"}},
        {"log": {"format": "xml"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_cannot_work(change: Mapping[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(change), SCHEMA)


def test_the_schema_knows_the_router_modes() -> None:
    modes = SCHEMA["properties"]["frontend"]["properties"]["routerMode"]["enum"]
    assert set(modes) == {mode.value for mode in RouterMode}


def test_nats_is_configured_as_in_the_base() -> None:
    assert (CHART / "files" / "nats.conf").read_text() == (BASE / "platform" / "nats" / "nats.conf").read_text()


@rendering
def test_the_defaults_install_what_the_base_does() -> None:
    ours = {(found["kind"], found["metadata"]["name"]): found for found in helm({})}
    theirs = {(found["kind"], name_of(found)): found for found in render(BASE) if found["kind"] != "Namespace"}
    assert ours.keys() == theirs.keys()
    for key, found in ours.items():
        assert comparable(found) == comparable(theirs[key]), key


@rendering
@pytest.mark.parametrize(
    "change",
    [
        {"frontend": {"tlsSecret": "front-tls", "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
        {"frontend": {"tlsSecret": "front-tls", "httpTls": True}},
        {"frontend": {"apiKeysSecret": "keys"}},
        {
            "etcd": {"enabled": False, "endpoints": ["https://etcd.example:2379"]},
            "nats": {"enabled": False, "servers": ["nats://n:4222"]},
        },
        {"etcd": {"replicas": 1, "storageClass": "fast"}, "nats": {"replicas": 1}},
        {"networkPolicies": False, "images": {"registry": "registry.example/", "pullSecrets": ["pull"]}},
        {
            "pools": {
                "gpu": {
                    "models": ["/models/a.gguf", "echo"],
                    "maxSurge": 0,
                    "extraArgs": ["--max-num-seqs=8"],
                    "env": [{"name": "DYN_CONTEXT_LENGTH", "value": "4096"}],
                    "resources": {"requests": {"cpu": 2, "nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 1}},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "nodeSelector": {"gpu": "a"},
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                }
            }
        },
    ],
    ids=lambda change: ",".join(change),
)
def test_other_values_make_valid_objects_that_our_programs_understand(change: Mapping[str, Any], tmp_path: Path) -> None:
    manifests = helm(change)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    for workload in workloads(manifests):
        for container in pod_containers(workload["spec"]["template"], "pod-0", manifests, SECRETS):
            placed = Placed(container, tmp_path / workload["metadata"]["name"], {})
            placed.write_files()
            if container.command[0] == "dynamo-frontend":
                assert load(FrontendConfig, placed.command[1:], placed.environment, program="f").grpc.wanted
            elif container.command[0] == "dynamo-worker":
                assert load(WorkerConfig, placed.command[1:], placed.environment, program="w").models


@rendering
def test_with_http_over_tls_probes_and_scrapes_use_it_too() -> None:
    manifests = helm({"frontend": {"tlsSecret": "front-tls", "httpTls": True, "apiKeysSecret": "keys"}} | MONITORED)
    [frontend] = [found for found in workloads(manifests) if found["metadata"]["name"] == "dynamo-frontend"]
    [container] = frontend["spec"]["template"]["spec"]["containers"]
    assert {container[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {"HTTPS"}
    assert {"DYN_HTTP_TLS_CERT_FILE", "DYN_API_KEYS_FILE"} <= {variable["name"] for variable in container["env"]}
    [endpoint] = of_kind(manifests, "PodMonitor")["dynamo-frontend"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"]["credentials"] == {"name": "metrics-key", "key": "key"}


@rendering
def test_values_that_the_schema_refuses_are_refused_by_helm() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm({"frontend": {"routerMode": "best"}})
    assert "routerMode" in refused.value.stderr


def name_of(manifest: Manifest) -> str:
    """Without the hash that kustomize appends to generated names."""
    name: str = manifest["metadata"]["name"]
    return name.rpartition("-")[0] if manifest["kind"] == "ConfigMap" else name


def comparable(manifest: Manifest) -> object:
    """A manifest without what differs by the tool: labels, annotations, generated names, comments in files, explicit defaults."""
    if manifest["kind"] == "ConfigMap":
        return {name: without_comments(text) for name, text in manifest_files(manifest).items()}
    return normal(manifest["spec"] if "spec" in manifest else {k: v for k, v in manifest.items() if k != "metadata"})


def normal(value: object) -> object:
    match value:
        case dict():
            return {
                key: normal(found)
                for key, found in value.items()
                if key not in ("labels", "annotations", "imagePullPolicy", "app.kubernetes.io/instance", "dynamo.ai/pool")
                and (key, found) != ("type", "ClusterIP")
            }
        case list():
            kept = [item for item in value if not (isinstance(item, dict) and item.get("key") == "app.kubernetes.io/instance")]
            return [normal(item) for item in kept]
        case str():
            return _HASHED_NAME.sub(r"\1", value.strip())
    return value


def without_comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
